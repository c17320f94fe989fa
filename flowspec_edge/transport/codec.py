"""Messages to ZeroMQ frames and back, strictly.

1. the header: msgpack of ``[type, layout, dims, index, scalar, scalar, ...]``.  The layout has the code of
   every array field ("int32 int32 int32 - uint8 float16": the fourth is absent), the dims the size of
   every named dimension, the index the bytes of all small arrays, concatenated (``transport.fields``);
2. the payload, if any: its bytes.

A batch has a header without fields, whose dims are the numbers of its parts' frames; these follow.

The messages that open a conversation carry the protocol version.  Its place in their headers, and the fields before
it, are the same in every version, and of another version's message no more is read: so the receiver can say which
versions meet, whatever else differs.

For any input, :func:`decode` returns a message or raises ProtocolError; nothing is unpickled, and arrays are
read-only views on the frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate, chain
from typing import Any, NamedTuple, cast

import msgpack

from flowspec_edge import messages as m
from flowspec_edge.errors import ProtocolError
from flowspec_edge.transport.fields import (
    ABSENT,
    MAX_DIM,
    MAX_TEXT,
    Array,
    ArrayField,
    Arrays,
    Bool,
    Buffer,
    Dense,
    FloatMap,
    Int,
    Ints,
    Scalar,
    Subset,
    Text,
    short,
)

MAX_HEADER_BYTES = 4 * 1024 * 1024  # the small arrays of the longest prompt chunk fit
_PART_FRAMES = 2
MAX_FRAMES = 1 + _PART_FRAMES * m.MAX_BATCH
MAX_ITEMS = 2 * MAX_DIM  # of a header; a list or map counts as _CONTAINER more
_CONTAINER = 1024
_MAX_MAP = 1024

Field = Scalar | ArrayField

_SESSION: dict[str, Field] = {"session": Int(), "epoch": Int()}
_RUN: dict[str, Field] = {**_SESSION, "run": Int()}
_STAGE: dict[str, Field] = {"instance": Text(), "stage": Int()}
_ROWS = Array("int32", ("n",))
_NUMBER = Int(high=2**31)  # of a row, or one past

# The fields of each message; its scalars and its arrays are each in wire order.
FIELDS: dict[type, dict[str, Field]] = {
    m.Open: {**_SESSION, "capacity": Int(low=1), "version": Int(), "concurrent": Ints(), "retained": Ints(),
             "parent_session": Int(low=-1), "rows": Int(), "timed": Bool(),
             "tentative": Int(), "snapshot": Int()},
    m.Close: {"session": Int(), "retain": Ints()},
    m.Segment: {**_RUN, "first": _NUMBER, "stop": _NUMBER, "base": _NUMBER, "taps": Ints(), "text": Bool(),
                "numbers": _ROWS, "positions": _ROWS, "committed": Array("int32", ("c",)),
                "tokens": Array("int32", ("n",), optional=True), "bits": Array("uint8", ("n", "w")),
                "hidden": Dense(optional=True)},
    m.Output: {**_RUN, "numbers": _ROWS, "hidden": Dense()},
    m.Tap: {**_RUN, "layer": Int(), "numbers": _ROWS, "hidden": Dense()},
    m.Prune: {**_SESSION, "sequence": Int(), "start": Int(), "stop": Int(), "keep": Subset()},
    m.Cancel: {**_SESSION, "runs": Ints()},
    m.Credit: _RUN,
    m.Computed: {**_RUN, "stage": Int(low=1), "rows": Int(), "batch_rows": Int(),
                 "start": Int(), "end": Int(), "sent": Int()},
    m.Hello: {**_STAGE, "stages": Int(low=1), "layers": Ints(length=2), "digest": Text(), "version": Int(),
              "newest": Int(low=-1), "rows": Int(low=1)},
    m.Heartbeat: {**_STAGE, "counters": FloatMap(), "isolated": Bool()},
    m.SessionReport: {**_STAGE, "session": Int(), "counters": FloatMap()},
    m.Failed: {**_STAGE, "cause": Text()},
    m.Shutdown: {"reason": Text()},
    m.Refusal: {},
}


class _Form(NamedTuple):
    type: type
    scalars: tuple[tuple[str, Scalar], ...]
    arrays: tuple[tuple[str, ArrayField], ...]
    optional: tuple[str, ...]  # of these arrays exactly one is present
    opening: tuple[tuple[str, Scalar], ...]  # the scalars up to the protocol version, if it carries that


def _form(kind: type, table: dict[str, Field]) -> _Form:
    differing = {f.name for f in fields(kind)} ^ table.keys()
    assert not differing, f"{kind.__name__}: wire form and dataclass differ in {differing}"
    arrays = {name: field for name, field in table.items() if isinstance(field, Array | Dense | Subset)}
    scalars = tuple((name, cast(Scalar, f)) for name, f in table.items() if name not in arrays)
    names = [name for name, _ in scalars]
    return _Form(kind, scalars, tuple(arrays.items()), tuple(name for name, field in arrays.items() if field.optional),
                 scalars[: names.index("version") + 1] if "version" in names else ())


_BATCH = m.Batch.__name__
_FORMS = {kind.__name__: _form(kind, table) for kind, table in FIELDS.items()}


def encode(message: m.Message) -> list[Buffer]:
    """Return the payload is not copied.

    ProtocolError for a value without the type, range or shape of ``messages``.
    """
    if isinstance(message, m.Batch):
        _check_parts(message.parts)
        parts = [encode(part) for part in message.parts]
        sizes = [len(part) for part in parts]
        return [cast(bytes, msgpack.packb([_BATCH, "", sizes, b""])), *chain.from_iterable(parts)]
    name = type(message).__name__
    form = _FORMS[name]
    arrays = Arrays()
    codes: list[str] = []
    scalars: list[Any] = []
    key = ""
    try:
        for key, scalar in form.scalars:
            scalars.append(scalar.pack(getattr(message, key)))
        for key, field in form.arrays:
            value = getattr(message, key)
            absent = value is None and field.optional
            codes.append(ABSENT if absent else field.pack(value, arrays, message))
    except (ProtocolError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"cannot send {name}.{key}: {error}") from error
    if form.optional and sum(getattr(message, key) is not None for key in form.optional) != 1:
        raise ProtocolError(f"cannot send {name}: it must have exactly one of {' and '.join(form.optional)}")
    header = [name, " ".join(codes), [*arrays.sizes.values()], b"".join(arrays.parts), *scalars]
    return [cast(bytes, msgpack.packb(header)), *arrays.frames]


def decode(frames: Sequence[Buffer]) -> m.Message:
    """Decode a message; ProtocolError for anything that :func:`encode` cannot make.

    Of another version's message, fields behind ``version`` have their defaults.
    """
    name, layout, dims, index, *scalars = _header(frames)
    if name == _BATCH:
        return _decode_batch([layout, index, scalars] == ["", b"", []], dims, frames[1:])
    form = _FORMS.get(name) if type(name) is str else None
    if form is None:
        raise ProtocolError(f"unknown message type {short(name)}; do all devices run the same release?")
    if _is_of_another_version(form, scalars):
        return cast(m.Message, form.type(**_unpacked(name, form.opening, scalars)))
    if len(scalars) != len(form.scalars):
        raise ProtocolError(f"{name}: expected {len(form.scalars)} scalar fields, got {len(scalars)}; "
                            "do all devices run the same release?")
    codes = layout.split(" ") if type(layout) is str and layout else []
    if len(codes) != len(form.arrays) or type(dims) is not list or type(index) is not bytes:
        raise ProtocolError(f"{name}: expected {len(form.arrays)} arrays, dimensions and bytes, "
                            f"got {short(layout)}, {short(dims)} and {short(index)}")
    arrays = Arrays(dims, index, frames[1:])
    values = _unpacked(name, form.scalars, scalars)
    key = ""
    try:
        for (key, field), code in zip(form.arrays, codes):  # noqa: B905 -- just checked
            absent = code == ABSENT and field.optional
            values[key] = None if absent else field.unpack(code, arrays, values)
        key = ""
        arrays.require_consumed()
    except ProtocolError as error:
        raise ProtocolError(f"{name}{key and '.'}{key}: {error}") from None
    if form.optional and sum(values[key] is not None for key in form.optional) != 1:
        raise ProtocolError(f"{name}: it must have exactly one of {' and '.join(form.optional)}")
    return cast(m.Message, form.type(**values))


def _is_of_another_version(form: _Form, scalars: Sequence[Any]) -> bool:
    if not form.opening or len(scalars) < len(form.opening):
        return False
    version = scalars[len(form.opening) - 1]
    return type(version) is int and version != m.PROTOCOL_VERSION


def _unpacked(name: str, form: Sequence[tuple[str, Scalar]], scalars: Sequence[Any]) -> dict[str, Any]:
    """Return the first scalars of a header by their names; the header may have more."""
    values: dict[str, Any] = {}
    for (key, scalar), value in zip(form, scalars, strict=False):
        try:
            values[key] = scalar.unpack(value)
        except ProtocolError as error:
            raise ProtocolError(f"{name}.{key}: {error}") from None
    return values


def _decode_batch(plain: bool, sizes: Any, frames: Sequence[Buffer]) -> m.Batch:
    """Decode a batch; ``sizes``: the number of frames of each part; ``plain``: the header has nothing else."""
    if (not plain or type(sizes) is not list or len(sizes) > m.MAX_BATCH
            or any(type(size) is not int or not 1 <= size <= _PART_FRAMES for size in sizes)
            or sum(sizes) != len(frames)):
        raise ProtocolError(f"{_BATCH}: {len(frames)} frames do not match its header, {short(sizes)}")
    parts = [decode(frames[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    _check_parts(parts)
    return m.Batch(cast(tuple[m.Segment | m.Output, ...], tuple(parts)))


def _check_parts(parts: Sequence[m.Message]) -> None:
    kinds = {type(part) for part in parts}
    if kinds not in ({m.Segment}, {m.Output}):
        raise ProtocolError(f"{_BATCH}: it has segments or outputs, not "
                            f"{' and '.join(sorted(kind.__name__ for kind in kinds)) or 'nothing'}")
    sessions = {part.session for part in cast(Sequence[m.Segment], parts)}
    if not 2 <= len(parts) <= m.MAX_BATCH or len(sessions) != len(parts):
        raise ProtocolError(f"{_BATCH}: {len(parts)} parts of {len(sessions)} sessions; it has 2 to "
                            f"{m.MAX_BATCH}, each of another session")


def _header(frames: Sequence[Buffer]) -> list[Any]:
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError(f"no header of at most {MAX_HEADER_BYTES} bytes; is the peer a flowspec device?")
    remaining = MAX_ITEMS

    def count(items: Any) -> Any:
        nonlocal remaining
        remaining -= _CONTAINER + len(items)
        if remaining < 0:
            raise ProtocolError("the header has more lists, maps or values than any message's; "
                                "is the peer a flowspec device?")
        return items

    try:
        header = msgpack.unpackb(frames[0], max_ext_len=0, max_array_len=MAX_DIM, max_map_len=_MAX_MAP,
                                 max_str_len=4 * MAX_TEXT, list_hook=count, object_hook=count)
    except (ValueError, TypeError, msgpack.UnpackException):
        header = None
    if type(header) is not list or len(header) < 4:
        raise ProtocolError("the header is not a message's; is the peer a flowspec device?")
    return header
