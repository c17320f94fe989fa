"""The wire forms of a message's fields.

Knows how one field becomes a value of the header and, for an array, bytes of a frame, and how it
is checked on the way back.  Does not know which message has which fields (``codec``).  Every
``unpack`` takes any value msgpack can give and raises ProtocolError for all but the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Payload

Buffer = bytes | memoryview  # of bytes: len() is its size

MAX_ROWS = 65_536  # of any dimension of an array
MAX_TEXT = 4_096

_INT32 = np.dtype("<i4")
_UINT8 = np.dtype("u1")
_INDEX_DTYPES: dict[str, np.dtype[Any]] = {"int32": _INT32, "uint8": _UINT8}
_PAYLOAD_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"),
}


@dataclass(slots=True)
class Writer:
    """The frames of ``message``, as they are filled; ``dims`` are the sizes of named dimensions."""

    message: Any
    index: list[bytes] = field(default_factory=list)
    tensors: list[Buffer] = field(default_factory=list)
    dims: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Reader:
    """The frames of one message, as they are used up; ``values`` are the fields read so far."""

    index: Buffer
    tensors: list[Buffer]
    offset: int = 0
    dims: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def take(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The next array of the index frame, as a read-only view."""
        end = self.offset + math.prod(shape) * dtype.itemsize
        if end > len(self.index):
            raise ProtocolError(f"index frame has {len(self.index)} bytes, at least {end} are needed")
        array = np.ndarray(shape, dtype, self.index, self.offset)
        array.flags.writeable = False
        self.offset = end
        return array

    def take_tensor(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The next payload frame, as a read-only view."""
        if not self.tensors:
            raise ProtocolError("payload frame missing")
        frame, size = self.tensors.pop(0), math.prod(shape) * dtype.itemsize
        if len(frame) != size:
            raise ProtocolError(f"payload frame has {len(frame)} bytes, {list(shape)} {dtype} is {size}")
        array = np.ndarray(shape, dtype, frame)
        array.flags.writeable = False
        return array


def _bind(dims: dict[str, int], names: tuple[str, ...], shape: Sequence[Any]) -> tuple[int, ...]:
    """Check ``shape`` against named dimensions: a name means the same size in the whole message."""
    if len(shape) != len(names):
        raise ProtocolError(f"expected {len(names)} dimensions, got {len(shape)}")
    for name, size in zip(names, shape, strict=True):
        if type(size) is not int or not 0 <= size <= MAX_ROWS:
            raise ProtocolError(f"dimension {name} must be 0 to {MAX_ROWS}, not {_short(size)}")
        if dims.setdefault(name, size) != size:
            raise ProtocolError(f"dimension {name} is {size} here and {dims[name]} in another field")
    return tuple(shape)


class Field(Protocol):
    """One field's wire form."""

    def pack(self, value: Any, writer: Writer) -> Any:
        """The header's value; the bytes of arrays are appended to ``writer``'s frames."""

    def unpack(self, value: Any, reader: Reader) -> Any:
        """The inverse; ProtocolError says what is wrong with ``value`` or the frames."""


@dataclass(frozen=True, slots=True)
class Int:
    """An integer of at most 63 bits."""

    low: int = 0

    def pack(self, value: Any, writer: Writer) -> Any:
        return int(value)

    def unpack(self, value: Any, reader: Reader) -> int:
        if type(value) is not int or not self.low <= value < 2**63:
            raise ProtocolError(f"expected an integer from {self.low} below 2^63, got {_short(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Real:
    """A double."""

    def pack(self, value: Any, writer: Writer) -> Any:
        return float(value)

    def unpack(self, value: Any, reader: Reader) -> float:
        if type(value) is not float:
            raise ProtocolError(f"expected a float, got {_short(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """At most MAX_TEXT characters; longer ones are cut when sent (a cause may be any length)."""

    def pack(self, value: Any, writer: Writer) -> Any:
        return str(value)[:MAX_TEXT]

    def unpack(self, value: Any, reader: Reader) -> str:
        if type(value) is not str or len(value) > MAX_TEXT:
            raise ProtocolError(f"expected at most {MAX_TEXT} characters, got {_short(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Ints:
    """A tuple of integers, of exactly ``length`` where one is given."""

    length: int | None = None

    def pack(self, value: Any, writer: Writer) -> Any:
        return [int(v) for v in value]

    def unpack(self, value: Any, reader: Reader) -> tuple[int, ...]:
        if type(value) is not list or any(type(v) is not int or not 0 <= v < 2**63 for v in value):
            raise ProtocolError(f"expected a list of integers from 0, got {_short(value)}")
        if self.length is not None and len(value) != self.length:
            raise ProtocolError(f"expected {self.length} integers, got {len(value)}")
        return tuple(value)


@dataclass(frozen=True, slots=True)
class Counters:
    """Named floats."""

    def pack(self, value: Any, writer: Writer) -> Any:
        return {str(k): float(v) for k, v in value.items()}

    def unpack(self, value: Any, reader: Reader) -> dict[str, float]:
        if type(value) is not dict or not all(type(k) is str and type(v) is float for k, v in value.items()):
            raise ProtocolError(f"expected a map of floats, got {_short(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Array:
    """A small array in the index frame."""

    dtype: str
    dims: tuple[str, ...]
    optional: bool = False

    def pack(self, value: Any, writer: Writer) -> Any:
        if value is None and self.optional:
            return None
        if value.dtype != _INDEX_DTYPES[self.dtype]:
            raise ProtocolError(f"expected {self.dtype}, got {value.dtype}")
        _bind(writer.dims, self.dims, value.shape)
        writer.index.append(value.tobytes())
        return [self.dtype, *value.shape]

    def unpack(self, value: Any, reader: Reader) -> NDArray[Any] | None:
        if value is None and self.optional:
            return None
        if type(value) is not list or not value or value[0] != self.dtype:
            raise ProtocolError(f"expected {self.dtype}{list(self.dims)}, got {_short(value)}")
        return reader.take(_INDEX_DTYPES[self.dtype], _bind(reader.dims, self.dims, value[1:]))


@dataclass(frozen=True, slots=True)
class Dense:
    """A Payload of shape [n, H] in a frame of its own; if ``unless`` names a field, exactly one of
    the two is there, and that field comes first."""

    unless: str = ""

    def pack(self, value: Any, writer: Writer) -> Any:
        if self.unless and (value is None) == (getattr(writer.message, self.unless) is None):
            raise ProtocolError(f"exactly one of this and {self.unless} must be given")
        if value is None:
            return None
        expected = _PAYLOAD_DTYPES.get(value.dtype)
        if expected is None or value.array.dtype != expected:
            raise ProtocolError(f"a {_short(value.dtype)} payload cannot be held in {value.array.dtype}")
        _bind(writer.dims, ("n", "H"), value.array.shape)
        array = np.ascontiguousarray(value.array)
        writer.tensors.append(array.data.cast("B") if array.size else b"")
        return [value.dtype, *value.array.shape]

    def unpack(self, value: Any, reader: Reader) -> Payload | None:
        if self.unless and (value is None) == (reader.values[self.unless] is None):
            raise ProtocolError(f"exactly one of this and {self.unless} must be given")
        if value is None and self.unless:
            return None
        dtype = value[0] if type(value) is list and value else None
        if type(dtype) is not str or dtype not in _PAYLOAD_DTYPES:
            raise ProtocolError(f"expected a payload's dtype and shape, got {_short(value)}")
        shape = _bind(reader.dims, ("n", "H"), value[1:])
        return Payload(dtype, reader.take_tensor(_PAYLOAD_DTYPES[dtype], shape))


@dataclass(frozen=True, slots=True)
class Subset:
    """An increasing int32 array within the message's [start, stop), in the shortest of three forms.

    "bits": one bit a number of the range; "gaps": one byte a member, the distance to the one
    before it (to start - 1 for the first); "int32": the numbers themselves.
    """

    def pack(self, value: Any, writer: Writer) -> Any:
        start, stop = writer.message.start, writer.message.stop
        gaps = np.diff(value, prepend=np.int32(start - 1))
        if value.dtype != _INT32 or value.ndim != 1 or (len(value) and (gaps.min() < 1 or value[-1] >= stop)):
            raise ProtocolError(f"expected increasing int32 within [{start}, {stop})")
        span = max(stop - start, 0)
        small = bool((gaps < 256).all())
        if (span + 7) // 8 <= len(value) * (1 if small else 4):
            flags = np.zeros(span, np.uint8)
            flags[value - start] = 1
            kind, data = "bits", np.packbits(flags, bitorder="little")
        else:
            kind, data = ("gaps", gaps.astype(np.uint8)) if small else ("int32", value)
        writer.index.append(data.tobytes())
        return [kind, len(data)]

    def unpack(self, value: Any, reader: Reader) -> NDArray[np.int32]:
        start, stop = reader.values["start"], reader.values["stop"]
        if type(value) is not list or not value or value[0] not in ("bits", "gaps", "int32"):
            raise ProtocolError(f"expected a set of numbers, got {_short(value)}")
        if not start <= stop < 2**31:
            raise ProtocolError(f"[{start}, {stop}) is no range of int32")
        (size,) = _bind({}, ("m",), value[1:])
        data = reader.take(_INT32 if value[0] == "int32" else _UINT8, (size,))
        if value[0] == "bits":
            if size != (stop - start + 7) // 8:
                raise ProtocolError(f"{size} bytes of bits for the range [{start}, {stop})")
            flags = np.unpackbits(data, bitorder="little")
            if flags[stop - start:].any():
                raise ProtocolError(f"bits past the range [{start}, {stop})")
            numbers = np.flatnonzero(flags) + start
        else:
            gaps = value[0] == "gaps"
            numbers = np.cumsum(data, dtype=np.int64) + start - 1 if gaps else data.astype(np.int64)
            if size and ((np.diff(numbers, prepend=start - 1) < 1).any() or numbers[-1] >= stop):
                raise ProtocolError(f"numbers not increasing within [{start}, {stop})")
        keep: NDArray[np.int32] = numbers.astype(np.int32)
        keep.flags.writeable = False
        return keep



def _short(value: Any) -> str:
    """A value of unknown size for an error text."""
    if isinstance(value, str | bytes | list | dict) and len(value) > 16:
        return f"a {type(value).__name__} of length {len(value)}"
    return repr(value)[:80]
