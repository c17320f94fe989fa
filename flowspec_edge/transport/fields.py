"""The wire form of message fields, and their checks on arrival.

A scalar is one value of the header.  An array has a code in the header (its element type or form; "-":
absent) and takes its sizes and bytes from :class:`Arrays`.  Every ``unpack`` accepts any value that msgpack
can give and raises ProtocolError for wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Payload

Buffer = bytes | memoryview  # of bytes: len() is its size

MAX_TEXT = 4_096  # characters
MAX_DIM = 65_536  # of any dimension of an array, and of lists in the header
ABSENT = "-"

_INT32, _UINT8 = np.dtype("<i4"), np.dtype("u1")
_DTYPES: dict[str, np.dtype[Any]] = {"int32": _INT32, "uint8": _UINT8}
_PAYLOADS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"),
}


class Scalar(Protocol):
    def pack(self, value: Any) -> Any:
        """Return the value for msgpack."""

    def unpack(self, value: Any) -> Any:
        ...


@dataclass(frozen=True, slots=True)
class Int:
    """An integer from ``low`` to ``high``."""

    low: int = 0
    high: int = 2**63 - 1

    def pack(self, value: Any) -> int:
        return self.unpack(int(value))

    def unpack(self, value: Any) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise ProtocolError(f"expected an integer from {self.low} to {self.high}, got {short(value)}")
        return value


class Bool:
    def pack(self, value: Any) -> bool:
        return bool(value)

    def unpack(self, value: Any) -> bool:
        if type(value) is not bool:
            raise ProtocolError(f"expected true or false, got {short(value)}")
        return value


class Text:
    """Truncated to MAX_TEXT characters when sent, since a cause may be any length.

    Surrogates (of a file name that is not UTF-8) are replaced.
    """

    def pack(self, value: Any) -> str:
        return str(value)[:MAX_TEXT].encode(errors="replace").decode()

    def unpack(self, value: Any) -> str:
        if type(value) is not str or len(value) > MAX_TEXT:
            raise ProtocolError(f"expected at most {MAX_TEXT} characters, got {short(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Ints:
    """A tuple of integers, of exactly ``length`` if one is given."""

    length: int | None = None

    def pack(self, value: Any) -> list[int]:
        packed = [int(v) for v in value]
        if len(packed) > MAX_DIM:
            raise ProtocolError(f"{len(packed)} integers are more than {MAX_DIM}")
        self.unpack(packed)
        return packed

    def unpack(self, value: Any) -> tuple[int, ...]:
        if type(value) is not list or any(type(v) is not int or not 0 <= v < 2**63 for v in value):
            raise ProtocolError(f"expected a list of integers from 0, got {short(value)}")
        if self.length is not None and len(value) != self.length:
            raise ProtocolError(f"expected {self.length} integers, got {len(value)}")
        return tuple(value)


class FloatMap:
    def pack(self, value: Any) -> dict[str, float]:
        return {str(k): float(v) for k, v in value.items()}

    def unpack(self, value: Any) -> dict[str, float]:
        if type(value) is not dict or not all(type(k) is str and type(v) is float for k, v in value.items()):
            raise ProtocolError(f"expected a map of floats, got {short(value)}")
        return value


class Arrays:
    """One message's arrays: named dimensions, bytes of small ones, the payload's frame.

    A dimension's name has one size per message; the header lists sizes in order of first use.
    """

    def __init__(self, dims: Sequence[int] = (), index: bytes = b"", frames: Sequence[Buffer] = ()) -> None:
        self.sizes: dict[str, int] = {}
        self.parts: list[bytes] = []  # packing: small arrays
        self.frames: list[Buffer] = list(frames)  # packed, or not unpacked yet
        self._dims: Iterator[int] = iter(dims)
        self._index = index
        self._offset = 0

    def put(self, array: NDArray[Any], names: tuple[str, ...]) -> None:
        """Enter an array's sizes; ProtocolError if they contradict earlier ones."""
        if len(names) != array.ndim:
            raise ProtocolError(f"expected {len(names)} dimensions, got {array.ndim}")
        for name, size in zip(names, array.shape):  # noqa: B905 -- just checked, and strict= is slow
            if self.sizes.setdefault(name, size) != size or size > MAX_DIM:
                raise ProtocolError(f"its {name} is {size}, not {min(self.sizes[name], MAX_DIM)}")

    def shape(self, names: tuple[str, ...]) -> list[int]:
        """Sizes of the array being unpacked."""
        for name in names:
            if name not in self.sizes:
                size = next(self._dims, None)
                if type(size) is not int or not 0 <= size <= MAX_DIM:
                    raise ProtocolError(f"its {name} must be 0 to {MAX_DIM}, not {short(size)}")
                self.sizes[name] = size
        return [self.sizes[name] for name in names]

    def take(self, dtype: np.dtype[Any], names: tuple[str, ...]) -> NDArray[Any]:
        """Return the next small array, read-only."""
        shape = self.shape(names)
        if self._offset + prod(shape) * dtype.itemsize > len(self._index):
            raise ProtocolError("needs more bytes than were sent")
        array: NDArray[Any] = np.ndarray(shape, dtype, self._index, self._offset)
        self._offset += array.nbytes
        return array

    def require_consumed(self) -> None:
        """Raise ProtocolError if anything is left over."""
        if self._offset != len(self._index):
            raise ProtocolError(f"the small arrays have {self._offset} bytes, {len(self._index)} were sent")
        if next(self._dims, None) is not None:
            raise ProtocolError("more dimensions than its arrays have")
        if self.frames:
            raise ProtocolError(f"{len(self.frames)} frames more than it has")


class ArrayField(Protocol):
    @property
    def optional(self) -> bool: ...

    def pack(self, value: Any, arrays: Arrays, message: Any) -> str:
        """Put an array that is not absent into ``arrays``; returns its code."""

    def unpack(self, code: str, arrays: Arrays, scalars: Mapping[str, Any]) -> Any:
        """Read a field's value; ``scalars`` are the message's scalar fields."""


@dataclass(frozen=True, slots=True)
class Array:
    """A small integer array with named dimensions."""

    dtype: str
    dims: tuple[str, ...]
    optional: bool = False

    def pack(self, value: Any, arrays: Arrays, message: Any) -> str:
        if value.dtype != _DTYPES[self.dtype]:
            raise ProtocolError(f"expected {self.dtype}, got {value.dtype}")
        arrays.put(value, self.dims)
        arrays.parts.append(value.tobytes())
        return self.dtype

    def unpack(self, code: str, arrays: Arrays, scalars: Mapping[str, Any]) -> NDArray[Any]:
        if code != self.dtype:
            raise ProtocolError(f"expected {self.dtype}, got {short(code)}")
        return arrays.take(_DTYPES[code], self.dims)


@dataclass(frozen=True, slots=True)
class Dense:
    """A Payload [n, H], in a frame of its own."""

    optional: bool = False

    def pack(self, value: Any, arrays: Arrays, message: Any) -> str:
        if value.array.dtype != _PAYLOADS.get(value.dtype):
            raise ProtocolError(f"a {short(value.dtype)} payload cannot be held in {value.array.dtype}")
        arrays.put(value.array, ("n", "H"))
        array = np.ascontiguousarray(value.array)
        arrays.frames.append(array.data.cast("B") if array.size else b"")
        return str(value.dtype)

    def unpack(self, code: str, arrays: Arrays, scalars: Mapping[str, Any]) -> Payload:
        dtype = _PAYLOADS.get(code)
        if dtype is None:
            raise ProtocolError(f"expected {', '.join(_PAYLOADS)}, got {short(code)}")
        shape = arrays.shape(("n", "H"))
        if not arrays.frames:
            raise ProtocolError("its frame is missing")
        frame = arrays.frames.pop(0)
        if len(frame) != prod(shape) * dtype.itemsize:
            raise ProtocolError(f"{shape} of {code} has {prod(shape) * dtype.itemsize} bytes, "
                                f"its frame {len(frame)}")
        array: NDArray[Any] = np.ndarray(shape, dtype, frame)
        if type(frame) is not bytes:
            array.flags.writeable = False
        return Payload(code, array)


class Subset:
    """An increasing int32 array within the message's [start, stop), in the shortest of three forms.

    "bits": one bit per number of the range; "gaps": one byte per member, the distance from the previous one
    (from start - 1 for the first); "int32": the numbers themselves.
    """

    optional = False

    def pack(self, value: Any, arrays: Arrays, message: Any) -> str:
        start, stop = message.start, message.stop
        if value.dtype != _INT32 or value.ndim != 1:
            raise ProtocolError(f"expected one dimension of int32, got {value.ndim} of {value.dtype}")
        gaps = np.diff(value, prepend=np.int32(start - 1))
        if stop < start or (len(value) and (gaps.min() < 1 or value[-1] >= stop)):
            raise ProtocolError(f"expected increasing numbers within [{start}, {stop})")
        small = bool((gaps < 256).all())
        if (stop - start + 7) // 8 <= len(value) * (1 if small else 4):
            flags = np.zeros(stop - start, np.uint8)
            flags[value - start] = 1
            code, array = "bits", np.packbits(flags, bitorder="little")
        else:
            code, array = ("gaps", gaps.astype(np.uint8)) if small else ("int32", value)
        arrays.put(array, ("m",))
        arrays.parts.append(array.tobytes())
        return code

    def unpack(self, code: str, arrays: Arrays, scalars: Mapping[str, Any]) -> NDArray[np.int32]:
        start, stop = scalars["start"], scalars["stop"]
        if not start <= stop < 2**31:
            raise ProtocolError(f"[{start}, {stop}) is no range of int32")
        if code not in ("bits", "gaps", "int32"):
            raise ProtocolError(f"unknown form {short(code)} of a set of numbers")
        array = arrays.take(_INT32 if code == "int32" else _UINT8, ("m",))
        if code == "bits":
            if len(array) != (stop - start + 7) // 8:
                raise ProtocolError(f"{len(array)} bytes of bits for the range [{start}, {stop})")
            flags = np.unpackbits(array, bitorder="little")
            if flags[stop - start:].any():
                raise ProtocolError(f"bits past the range [{start}, {stop})")
            numbers = np.flatnonzero(flags) + start
        else:
            numbers = array.astype(np.int64)
            if code == "gaps":
                numbers = np.cumsum(numbers) + start - 1
            if len(numbers) and ((np.diff(numbers, prepend=start - 1) < 1).any() or numbers[-1] >= stop):
                raise ProtocolError(f"numbers not increasing within [{start}, {stop})")
        keep: NDArray[np.int32] = numbers.astype(np.int32)
        keep.flags.writeable = False
        return keep


def short(value: Any) -> str:
    """Shorten a value for an error's text."""
    if isinstance(value, str | bytes | list | dict) and len(value) > 16:
        return f"a {type(value).__name__} of length {len(value)}"
    return repr(value)[:80]
