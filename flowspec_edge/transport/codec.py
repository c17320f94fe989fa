"""Messages to ZeroMQ frames and back, strictly.

Knows the fields of every message of ``messages`` on the wire.  Does not know sockets, nor what a
message is for.

Frames of one message, in order:

1. the header: msgpack of ``[type name, {field: value}]``; an array's value is its dtype and shape,
   so nothing about an array is guessed;
2. the index frame, in messages that have small arrays: their bytes, back to back;
3. the payload, where there is one: its bytes, untouched.

Small arrays share a frame because a frame costs about as much as copying 100 KB.  Nothing is
unpickled.  Whatever bytes come in, :func:`decode` returns a message or raises ProtocolError; the
arrays of a decoded message are read-only, and large ones are views on the frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import msgpack

from flowspec_edge import messages as m
from flowspec_edge.errors import ProtocolError
from flowspec_edge.transport.fields import (
    MAX_ROWS,
    Array,
    Buffer,
    Counters,
    Dense,
    Field,
    Int,
    Ints,
    Reader,
    Real,
    Subset,
    Text,
    Writer,
)

MAX_HEADER_BYTES = 64 * 1024
MAX_FRAMES = 3

_SESSION: dict[str, Field] = {"session": Int(), "epoch": Int()}
_PEER: dict[str, Field] = {"instance": Text(), "stage": Int()}

# Fields in the order in which their bytes follow one another: within a message, equally named
# dimensions have equal sizes.
_FIELDS: dict[type, dict[str, Field]] = {
    m.Open: {**_SESSION, "capacity": Int(low=1), "version": Int()},
    m.Close: {"session": Int()},
    m.Segment: {
        **_SESSION, "run": Int(), "first": Int(), "stop": Int(), "base": Int(),
        "numbers": Array("int32", ("n",)), "positions": Array("int32", ("n",)),
        "committed": Array("int32", ("c",)), "tokens": Array("int32", ("n",), optional=True),
        "bits": Array("uint8", ("n", "w")), "hidden": Dense(unless="tokens"), "taps": Ints(),
    },
    m.Output: {**_SESSION, "run": Int(), "numbers": Array("int32", ("n",)), "hidden": Dense(),
               "stage_seconds": Real()},
    m.Tap: {**_SESSION, "run": Int(), "layer": Int(), "numbers": Array("int32", ("n",)), "hidden": Dense()},
    m.Prune: {**_SESSION, "sequence": Int(), "start": Int(), "stop": Int(), "keep": Subset()},
    m.Cancel: {**_SESSION, "runs": Ints()},
    m.Credit: {**_SESSION, "run": Int()},
    m.Hello: {**_PEER, "stages": Int(low=1), "layers": Ints(length=2), "digest": Text(), "version": Int()},
    m.Heartbeat: {**_PEER, "counters": Counters()},
    m.Failed: {**_PEER, "cause": Text()},
    m.Shutdown: {"reason": Text()},
}


@dataclass(frozen=True, slots=True)
class _Form:
    """The wire form of one message type; ``items`` and ``index`` are what :func:`decode` looks at."""

    type: type
    fields: dict[str, Field]
    index: bool  # whether there is an index frame


def _form(kind: type) -> _Form:
    specs = _FIELDS[kind]
    missing = {f.name for f in fields(kind)} ^ specs.keys()
    assert not missing, f"{kind.__name__}: wire form and dataclass differ in {missing}"
    return _Form(kind, specs, any(isinstance(spec, Array | Subset) for spec in specs.values()))


_FORMS = {kind.__name__: _form(kind) for kind in _FIELDS}


def encode(message: m.Message) -> list[Buffer]:
    """The frames of ``message``; a payload's frame is its array itself, not a copy.

    Raises ProtocolError if an array does not have the dtype or shape that ``messages`` promises.
    """
    name = type(message).__name__
    writer = Writer(message)
    header: dict[str, Any] = {}
    form = _FORMS[name]
    for key, spec in form.fields.items():
        try:
            header[key] = spec.pack(getattr(message, key), writer)
        except ProtocolError as error:
            raise ProtocolError(f"cannot send {name}.{key}: {error}") from None
    frames: list[Buffer] = [cast(bytes, msgpack.packb([name, header]))]
    if form.index:
        frames.append(b"".join(writer.index))
    return frames + writer.tensors


def decode(frames: Sequence[Buffer]) -> m.Message:
    """The message in ``frames``; raises ProtocolError for anything that :func:`encode` cannot make."""
    name, header = _header(frames[0] if frames else b"")
    form = _FORMS[name]
    if header.keys() != form.fields.keys():
        raise ProtocolError(f"{name}: {_difference(header.keys(), form.fields.keys())}")
    if form.index and len(frames) < 2:
        raise ProtocolError(f"{name}: index frame missing")
    used = 2 if form.index else 1
    reader = Reader(frames[1] if form.index else b"", list(frames[used:]))
    values = reader.values
    for key, spec in form.fields.items():
        try:
            values[key] = spec.unpack(header[key], reader)
        except ProtocolError as error:
            raise ProtocolError(f"{name}.{key}: {error}") from None
    if reader.offset != len(reader.index):
        raise ProtocolError(f"{name}: {len(reader.index) - reader.offset} bytes too many in the index frame")
    if reader.tensors:
        raise ProtocolError(f"{name}: {len(reader.tensors)} frames too many")
    return cast(m.Message, form.type(**values))


def _header(frame: Buffer) -> tuple[str, dict[str, Any]]:
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        parts = msgpack.unpackb(frame, raw=False, strict_map_key=True, max_ext_len=0,
                                max_array_len=MAX_ROWS, max_map_len=MAX_ROWS)
    except (ValueError, TypeError, msgpack.UnpackException):
        raise ProtocolError("header is not valid msgpack; is the peer a flowspec device?") from None
    if type(parts) is not list or len(parts) != 2 or type(parts[0]) is not str or type(parts[1]) is not dict:
        raise ProtocolError("header is not [type, fields]; is the peer a flowspec device?")
    if parts[0] not in _FORMS:
        raise ProtocolError(f"unknown message type {parts[0][:40]!r}; do all devices run the same release?")
    return parts[0], parts[1]


def _difference(got: Any, expected: Any) -> str:
    missing, unknown = sorted(expected - got), sorted(str(key)[:40] for key in got - expected)
    what = [f"missing field {missing[0]!r}"] if missing else []
    what += [f"unknown field {unknown[0]!r}"] if unknown else []
    return " and ".join(what) + "; do all devices run the same release?"
