"""The wire forms of a message's fields.

Knows how one field becomes a value of the header or an array, and how it is checked on the way
back.  Does not know which message has which fields, nor how they are laid out (``codec``).  Every
``unpack`` takes any value msgpack can give and raises ProtocolError for all but the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Payload

MAX_TEXT = 4_096  # characters
ABSENT = "-"

_INT32 = np.dtype("<i4")
_UINT8 = np.dtype("u1")
_INDEX: dict[str, np.dtype[Any]] = {"int32": _INT32, "uint8": _UINT8}
_DENSE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"),
}


class Scalar(Protocol):
    """A field that is a value of the header."""

    def pack(self, value: Any) -> Any:
        """What msgpack is to write."""

    def unpack(self, value: Any) -> Any:
        """The inverse; ProtocolError says what is wrong with ``value``."""


@dataclass(frozen=True, slots=True)
class Int:
    """An integer from ``low``, below 2^63."""

    low: int = 0

    def pack(self, value: Any) -> int:
        return int(value)

    def unpack(self, value: Any) -> int:
        if type(value) is not int or not self.low <= value < 2**63:
            raise ProtocolError(f"expected an integer from {self.low} below 2^63, got {short(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def pack(self, value: Any) -> bool:
        return bool(value)

    def unpack(self, value: Any) -> bool:
        if type(value) is not bool:
            raise ProtocolError(f"expected true or false, got {short(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """At most MAX_TEXT characters; longer ones are cut when sent (a cause may be any length)."""

    def pack(self, value: Any) -> str:
        return str(value)[:MAX_TEXT]

    def unpack(self, value: Any) -> str:
        if type(value) is not str or len(value) > MAX_TEXT:
            raise ProtocolError(f"expected at most {MAX_TEXT} characters, got {short(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Ints:
    """A tuple of integers, of exactly ``length`` where one is given."""

    length: int | None = None

    def pack(self, value: Any) -> list[int]:
        return [int(v) for v in value]

    def unpack(self, value: Any) -> tuple[int, ...]:
        if value == [] and not self.length:  # the usual case: no taps
            return ()
        if type(value) is not list or any(type(v) is not int or not 0 <= v < 2**63 for v in value):
            raise ProtocolError(f"expected a list of integers from 0, got {short(value)}")
        if self.length is not None and len(value) != self.length:
            raise ProtocolError(f"expected {self.length} integers, got {len(value)}")
        return tuple(value)


@dataclass(frozen=True, slots=True)
class Counters:
    """Named floats."""

    def pack(self, value: Any) -> dict[str, float]:
        return {str(k): float(v) for k, v in value.items()}

    def unpack(self, value: Any) -> dict[str, float]:
        if type(value) is not dict or not all(type(k) is str and type(v) is float for k, v in value.items()):
            raise ProtocolError(f"expected a map of floats, got {short(value)}")
        return value


class ArrayField(Protocol):
    """A field that travels as an array, its form named by a code of the header's layout.

    dims   named dimensions; a name stands for one size in the whole message
    codes  every form that the field may have, and its element type; None: the field is absent
    """

    @property
    def dims(self) -> tuple[str, ...]: ...

    @property
    def codes(self) -> Mapping[str, np.dtype[Any] | None]: ...

    def code(self, value: Any) -> str:
        """The code that ``value`` seems to have; cheap, and :meth:`pack` has the last word."""

    def pack(self, value: Any, message: Any) -> tuple[str, NDArray[Any] | None]:
        """The form's code and the array to send."""

    def unpack(self, code: str, array: NDArray[Any] | None, values: Mapping[str, Any]) -> Any:
        """The inverse; ``array`` is read-only, ``values`` are the message's scalar fields."""


@dataclass(frozen=True, slots=True)
class Array:
    """A small integer array."""

    dtype: str
    dims: tuple[str, ...]
    optional: bool = False

    @property
    def codes(self) -> dict[str, np.dtype[Any] | None]:
        absent: dict[str, np.dtype[Any] | None] = {ABSENT: None} if self.optional else {}
        return {self.dtype: _INDEX[self.dtype], **absent}

    def code(self, value: Any) -> str:
        return ABSENT if value is None else self.dtype

    def pack(self, value: Any, message: Any) -> tuple[str, NDArray[Any] | None]:
        if value is None:
            return ABSENT, None
        if value.dtype != _INDEX[self.dtype]:
            raise ProtocolError(f"expected {self.dtype}, got {value.dtype}")
        return self.dtype, value

    def unpack(self, code: str, array: NDArray[Any] | None, values: Mapping[str, Any]) -> Any:
        return array


@dataclass(frozen=True, slots=True)
class Dense:
    """A Payload of shape [n, H]."""

    optional: bool = False
    dims: tuple[str, ...] = ("n", "H")

    @property
    def codes(self) -> dict[str, np.dtype[Any] | None]:
        return {**_DENSE, ABSENT: None} if self.optional else {**_DENSE}

    def code(self, value: Any) -> str:
        return ABSENT if value is None else str(value.dtype)

    def pack(self, value: Any, message: Any) -> tuple[str, NDArray[Any] | None]:
        if value is None:
            return ABSENT, None
        if value.array.dtype != _DENSE.get(value.dtype):
            raise ProtocolError(f"a {short(value.dtype)} payload cannot be held in {value.array.dtype}")
        return value.dtype, np.ascontiguousarray(value.array)

    def unpack(self, code: str, array: NDArray[Any] | None, values: Mapping[str, Any]) -> Payload | None:
        return None if array is None else Payload(code, array)


@dataclass(frozen=True, slots=True)
class Subset:
    """An increasing int32 array within the message's [start, stop), in the shortest of three forms.

    "bits": one bit a number of the range; "gaps": one byte a member, the distance to the one
    before it (to start - 1 for the first); "int32": the numbers themselves.
    """

    dims: tuple[str, ...] = ("m",)

    @property
    def codes(self) -> dict[str, np.dtype[Any] | None]:
        return {"bits": _UINT8, "gaps": _UINT8, "int32": _INT32}

    def code(self, value: Any) -> str:
        return "bits"

    def pack(self, value: Any, message: Any) -> tuple[str, NDArray[Any] | None]:
        span = message.stop - message.start
        if value.dtype != _INT32 or value.ndim != 1:
            raise ProtocolError(f"expected one dimension of int32, got {value.ndim} of {value.dtype}")
        gaps = np.diff(value, prepend=np.int32(message.start - 1))
        if span < 0 or (len(value) and (gaps.min() < 1 or value[-1] >= message.stop)):
            raise ProtocolError(f"expected increasing numbers within [{message.start}, {message.stop})")
        small = bool((gaps < 256).all())
        if (span + 7) // 8 <= len(value) * (1 if small else 4):
            flags = np.zeros(span, np.uint8)
            flags[value - message.start] = 1
            return "bits", np.packbits(flags, bitorder="little")
        return ("gaps", gaps.astype(np.uint8)) if small else ("int32", value)

    def unpack(self, code: str, array: NDArray[Any] | None, values: Mapping[str, Any]) -> NDArray[np.int32]:
        start, stop = values["start"], values["stop"]
        if array is None or not start <= stop < 2**31:
            raise ProtocolError(f"[{start}, {stop}) is no range of int32")
        if code == "bits":
            if len(array) != (stop - start + 7) // 8:
                raise ProtocolError(f"{len(array)} bytes of bits for the range [{start}, {stop})")
            flags = np.unpackbits(array, bitorder="little")
            if flags[stop - start:].any():
                raise ProtocolError(f"bits past the range [{start}, {stop})")
            numbers = np.flatnonzero(flags) + start
        else:
            gaps = code == "gaps"
            numbers = np.cumsum(array, dtype=np.int64) + start - 1 if gaps else array.astype(np.int64)
            if len(numbers) and ((np.diff(numbers, prepend=start - 1) < 1).any() or numbers[-1] >= stop):
                raise ProtocolError(f"numbers not increasing within [{start}, {stop})")
        keep: NDArray[np.int32] = numbers.astype(np.int32)
        keep.flags.writeable = False
        return keep


def short(value: Any) -> str:
    """A value of unknown size for an error text."""
    if isinstance(value, str | bytes | list | dict) and len(value) > 16:
        return f"a {type(value).__name__} of length {len(value)}"
    return repr(value)[:80]
