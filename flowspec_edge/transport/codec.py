"""Messages to ZeroMQ frames and back, strictly.

Knows the fields of every message of ``messages`` on the wire.  Does not know sockets, nor what a
message is for.

Frames of one message, in order:

1. the header: msgpack of ``[type, layout, dims, index, scalar, scalar, ...]``.  The layout names
   the element type of every array field ("int32 int32 int32 - uint8 float16": the fourth is
   absent), the dims give every dimension's size, so nothing about an array is guessed; the index
   is the bytes of all arrays but the payload, some hundred, back to back;
2. the payload, where there is one: its bytes, untouched.

The form is made for speed: a hop should cost little more than its bytes (``bench.micro_hop``), and
on a small board every extra frame and every Python call shows.  Nothing is unpickled.  Whatever
bytes come in, :func:`decode` returns a message or raises ProtocolError; the arrays of a decoded
message are read-only views on the frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np

from flowspec_edge import messages as m
from flowspec_edge.errors import ProtocolError
from flowspec_edge.transport import compiled
from flowspec_edge.transport.fields import (
    ABSENT,
    Array,
    ArrayField,
    Counters,
    Dense,
    Flag,
    Int,
    Ints,
    Scalar,
    Subset,
    Text,
    short,
)

Buffer = bytes | memoryview  # of bytes: len() is its size

MAX_HEADER_BYTES = 4 * 1024 * 1024  # the index of the longest prompt chunk fits
MAX_FRAMES = 2
MAX_DIM = 65_536  # of any dimension of an array, and of lists in the header

Pick = Callable[[tuple[int, ...]], tuple[int, ...]]

_SESSION: dict[str, Scalar] = {"session": Int(), "epoch": Int()}
_PEER: dict[str, Scalar] = {"instance": Text(), "stage": Int()}
_ROWS = Array("int32", ("n",))

# Of each message the scalar fields and the array fields, in the order in which they are sent.
_FIELDS: dict[type, tuple[dict[str, Scalar], dict[str, ArrayField]]] = {
    m.Open: ({**_SESSION, "capacity": Int(low=1), "version": Int(), "beside": Ints(),
              "held": Ints(), "after": Int(low=-1), "rows": Int(), "timed": Flag()}, {}),
    m.Close: ({"session": Int(), "kept": Ints()}, {}),
    m.Segment: (
        {**_SESSION, "run": Int(), "first": Int(), "stop": Int(), "base": Int(), "taps": Ints()},
        {"numbers": _ROWS, "positions": _ROWS, "committed": Array("int32", ("c",)),
         "tokens": Array("int32", ("n",), optional=True), "bits": Array("uint8", ("n", "w")),
         "hidden": Dense(optional=True)},
    ),
    m.Output: ({**_SESSION, "run": Int()}, {"numbers": _ROWS, "hidden": Dense()}),
    m.Tap: ({**_SESSION, "run": Int(), "layer": Int()}, {"numbers": _ROWS, "hidden": Dense()}),
    m.Prune: ({**_SESSION, "sequence": Int(), "start": Int(), "stop": Int()}, {"keep": Subset()}),
    m.Cancel: ({**_SESSION, "runs": Ints()}, {}),
    m.Credit: ({**_SESSION, "run": Int()}, {}),
    m.Computed: ({**_SESSION, "run": Int(), "stage": Int(low=1), "rows": Int(), "start": Int(), "end": Int(),
                  "sent": Int()}, {}),
    m.Hello: (
        {**_PEER, "stages": Int(low=1), "layers": Ints(length=2), "digest": Text(), "version": Int()}, {},
    ),
    m.Heartbeat: ({**_PEER, "counters": Counters()}, {}),
    m.Failed: ({**_PEER, "cause": Text()}, {}),
    m.Shutdown: ({"reason": Text()}, {}),
}


class _Slot(NamedTuple):
    """One array field in one layout."""

    name: str
    field: ArrayField
    code: str
    dtype: np.dtype[Any] | None  # None: absent
    shape: Pick  # out of the dims
    dense: bool  # in a frame of its own


class _Layout(NamedTuple):
    """The array fields of a message when each has one certain form."""

    slots: tuple[_Slot, ...]
    dims: tuple[str, ...]  # in the order in which the slots first name them
    frames: int


class _Form(NamedTuple):
    """The wire form of one message type."""

    type: type
    scalars: tuple[tuple[str, Scalar], ...]
    arrays: tuple[tuple[str, ArrayField], ...]
    layouts: dict[str, _Layout]
    variable: tuple[tuple[str, ArrayField], ...]  # arrays that have more than one form
    encoders: dict[tuple[str, ...], compiled.Encoder]  # by the codes of the variable arrays


def _form(kind: type, scalars: dict[str, Scalar], arrays: dict[str, ArrayField]) -> _Form:
    differing = {f.name for f in fields(kind)} ^ (scalars.keys() | arrays.keys())
    assert not differing, f"{kind.__name__}: wire form and dataclass differ in {differing}"
    # Of optional arrays (a segment's tokens and hidden states) exactly one is there.
    absent = max(0, sum(ABSENT in field.codes for field in arrays.values()) - 1)
    layouts = {
        " ".join(codes): _layout(arrays, codes)
        for codes in product(*(field.codes for field in arrays.values())) if codes.count(ABSENT) == absent
    }
    variable = tuple((name, field) for name, field in arrays.items() if len(field.codes) > 1)
    encoders = {}
    for codes in map(str.split, layouts) if compiled.compilable(arrays) else ():
        chosen = dict(zip(arrays, codes, strict=True))
        key = tuple(chosen[name] for name, _ in variable)
        encoders[key] = compiled.encoder(kind, scalars, arrays, chosen, MAX_DIM)
        _DECODERS[kind.__name__, " ".join(codes)] = compiled.decoder(kind, scalars, arrays, chosen, MAX_DIM)
    return _Form(kind, tuple(scalars.items()), tuple(arrays.items()), layouts, variable, encoders)


def _layout(arrays: dict[str, ArrayField], codes: tuple[str, ...]) -> _Layout:
    present = [field.dims if code != ABSENT else ()
               for field, code in zip(arrays.values(), codes, strict=True)]
    order = list(dict.fromkeys(dim for dims in present for dim in dims))
    slots = tuple(
        _Slot(name, field, code, field.codes[code], _pick([order.index(dim) for dim in dims]),
              isinstance(field, Dense) and code != ABSENT)
        for (name, field), code, dims in zip(arrays.items(), codes, present, strict=True))
    return _Layout(slots, tuple(order), 1 + sum(slot.dense for slot in slots))


def _pick(positions: list[int]) -> Pick:
    """Of a tuple, the tuple of the elements at ``positions``."""
    if len(positions) > 1:
        return itemgetter(*positions)
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))


_DECODERS: dict[tuple[str, str], compiled.Decoder] = {}
_FORMS = {kind.__name__: _form(kind, *specs) for kind, specs in _FIELDS.items()}


def encode(message: m.Message) -> list[Buffer]:
    """The frames of ``message``; a payload's frame is its array itself, not a copy.

    Raises ProtocolError if an array does not have the dtype or shape that ``messages`` promises.
    """
    form = _FORMS[type(message).__name__]
    if form.encoders:
        try:
            codes = tuple([field.code(getattr(message, name)) for name, field in form.variable])
            frames = form.encoders[codes](message)
            if frames is not None:
                return frames
        except (KeyError, *compiled.REFUSALS):
            pass  # the slow way knows why
    return encode_slowly(message)


def encode_slowly(message: m.Message) -> list[Buffer]:
    """:func:`encode`, field by field: for every message, and with an error for a wrong one."""
    name = type(message).__name__
    form = _FORMS[name]
    codes: list[str] = []
    dims: dict[str, int] = {}
    index: list[bytes] = []
    payload: list[Buffer] = []
    key = ""
    try:
        for key, field in form.arrays:
            code, array = field.pack(getattr(message, key), message)
            codes.append(code)
            if array is None:
                continue
            _agree(dims, field.dims, array.shape)
            if isinstance(field, Dense):
                payload.append(array.data.cast("B") if array.size else b"")
            else:
                index.append(array.tobytes())
    except ProtocolError as error:
        raise ProtocolError(f"cannot send {name}.{key}: {error}") from None
    layout = " ".join(codes)
    if layout not in form.layouts:
        raise ProtocolError(f"cannot send {name}: its arrays cannot be {layout!r}")
    header = [name, layout, [*dims.values()], b"".join(index)]
    header += [scalar.pack(getattr(message, key)) for key, scalar in form.scalars]
    return [cast(bytes, msgpack.packb(header)), *payload]


def _agree(dims: dict[str, int], names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Enter an array's sizes in ``dims``; ProtocolError if arrays before it had others."""
    if len(names) != len(shape):
        raise ProtocolError(f"expected {len(names)} dimensions, got {len(shape)}")
    for name, size in zip(names, shape):  # noqa: B905 -- just checked, and strict= is slow
        if dims.setdefault(name, size) != size or size > MAX_DIM:
            raise ProtocolError(f"its {name} is {size}, but {min(dims[name], MAX_DIM)} is what fits")


def decode(frames: Sequence[Buffer]) -> m.Message:
    """The message in ``frames``; raises ProtocolError for anything that :func:`encode` cannot make."""
    header = _unpack(frames)
    try:
        fast = _DECODERS.get((header[0], header[1]))
        message = fast(header[2], header[3], header[4:], frames) if fast else None
        if message is not None:
            return cast(m.Message, message)
    except (ProtocolError, *compiled.REFUSALS):
        pass  # the slow way knows why
    return decode_slowly(frames)


def decode_slowly(frames: Sequence[Buffer]) -> m.Message:
    """:func:`decode`, field by field: for every message, and with an error for a wrong one."""
    form, layout, dims, index, scalars = _header(frames)
    values: dict[str, Any] = {}
    key = ""
    try:
        for (key, field), scalar in zip(form.scalars, scalars):  # noqa: B905 -- as _header checked
            values[key] = field.unpack(scalar)
        offset = 0
        for key, array_field, code, dtype, shape, dense in layout.slots:
            array = None
            if dense:
                array = _payload(frames[1], dtype, shape(dims))
            elif dtype is not None:
                array = np.ndarray(shape(dims), dtype, index, offset)
                offset += array.nbytes
            values[key] = array_field.unpack(code, array, values)
        if offset != len(index):
            raise ProtocolError(f"the small arrays have {offset} bytes, {len(index)} were sent")
    except ProtocolError as error:
        raise ProtocolError(f"{form.type.__name__}.{key}: {error}") from None
    except TypeError:  # what numpy says to a buffer that is too small
        raise ProtocolError(f"{form.type.__name__}.{key}: needs more bytes than were sent") from None
    return cast(m.Message, form.type(**values))


def _payload(frame: Buffer, dtype: np.dtype[Any] | None, shape: tuple[int, ...]) -> Any:
    array = np.ndarray(shape, dtype, frame)
    if array.nbytes != len(frame):
        raise ProtocolError(f"{list(shape)} of {dtype} has {array.nbytes} bytes, its frame {len(frame)}")
    if type(frame) is not bytes:
        array.flags.writeable = False
    return array


def _unpack(frames: Sequence[Buffer]) -> list[Any]:
    """The header's values: at least type, layout, dims and index."""
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError(f"no header of at most {MAX_HEADER_BYTES} bytes; is the peer a flowspec device?")
    try:
        header = msgpack.unpackb(frames[0], max_ext_len=0, max_array_len=MAX_DIM)
    except (ValueError, TypeError, msgpack.UnpackException):
        header = None
    if type(header) is not list or len(header) < 4:
        raise ProtocolError("the header is not ours; is the peer a flowspec device?")
    return header


def _header(frames: Sequence[Buffer]) -> tuple[_Form, _Layout, tuple[int, ...], bytes, list[Any]]:
    """The message's form, its layout, its dims, the index and the scalars."""
    name, code, dims, index, *scalars = _unpack(frames)
    form = _FORMS.get(name) if type(name) is str else None
    if form is None:
        raise ProtocolError(f"unknown message type {short(name)}; do all devices run the same release?")
    layout = form.layouts.get(code) if type(code) is str else None
    if layout is None:
        raise ProtocolError(f"{name}: its arrays cannot be {short(code)}")
    if len(frames) != layout.frames:
        raise ProtocolError(f"{name}: expected {layout.frames} frames, got {len(frames)}")
    if len(scalars) != len(form.scalars):
        raise ProtocolError(f"{name}: expected {len(form.scalars)} scalar fields, got {len(scalars)}; "
                            "do all devices run the same release?")
    if type(index) is not bytes or type(dims) is not list or len(dims) != len(layout.dims):
        raise ProtocolError(f"{name}: expected bytes and {len(layout.dims)} dimensions, got {short(dims)}")
    for size in dims:
        if type(size) is not int or not 0 <= size <= MAX_DIM:
            raise ProtocolError(f"{name}: a dimension must be 0 to {MAX_DIM}, not {short(size)}")
    return form, layout, tuple(dims), index, scalars
