"""The header of a GGUF file: metadata, and where each tensor is.

Source of the format: docs/gguf.md in ggml's repository, versions 2 and 3.  The ``gguf`` package has a reader, too.
It takes seconds for a vocabulary of 152,000 tokens, and it never ends on a file that states an absurd count; here
every count is compared with what is left of the file first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.weights.gguf_types import BlockType, library

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1", 10: "<u8", 11: "<i8",
            12: "<f8"}
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32  # unless general.alignment says otherwise
_KEY_BYTES = 65_535  # of a key or a tensor's name, as the format allows


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file.

    shape  rows first, as PyTorch has them; the file states them the other way round
    at     its first byte in the file
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    at: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.values * self.type.size

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file; ``fields``: numbers, strings, lists of strings and arrays of numbers, by key."""

    path: Path
    size: int
    fields: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_header(path: Path) -> GgufHeader:
    """Read a file's header.

    FlowspecError in one line for a file that is cut short, damaged or of another format, for types of blocks that
    are unknown, and for tensors beyond the file's end.
    """
    types = _block_types()
    try:
        with path.open("rb") as file:
            return _Reader(path, file, types).header()
    except OSError as error:
        raise FlowspecError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, struct.error, OverflowError) as error:
        raise FlowspecError(f"{path} is truncated or damaged ({error}): copy the file again") from error


def _block_types() -> dict[int, BlockType]:
    gguf = library()
    return {int(kind): BlockType(kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}


class _Reader:
    """Raises ValueError for what cannot be."""

    def __init__(self, path: Path, file: BinaryIO, types: dict[int, BlockType]) -> None:
        self._path, self._file, self._types = path, file, types
        self._size = path.stat().st_size

    def header(self) -> GgufHeader:
        if self._file.read(4) != _MAGIC:
            raise UsageError(f"{self._path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
        version = self._number("<u4")
        if version not in _VERSIONS:
            kind = "big-endian" if version >= 1 << 16 else f"of version {version}"
            raise UsageError(f"{self._path}: a GGUF file {kind} cannot be read, only versions 2 and 3 in little-endian")
        tensors, count = self._count(24), self._count(12)
        fields: dict[str, Any] = {}
        for _ in range(count):
            key = self._string(_KEY_BYTES)
            if key in fields:
                raise ValueError(f"{key} is there twice")
            fields[key] = self._value(self._number("<u4"))
        relative = [self._tensor() for _ in range(tensors)]
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self._file.tell() // alignment) * alignment
        located = tuple(GgufTensor(tensor.name, tensor.shape, tensor.type, begin + tensor.at) for tensor in relative)
        if len({tensor.name for tensor in located}) < len(located):
            raise ValueError("a tensor is there twice")
        for tensor in located:
            if tensor.at % alignment or tensor.at + tensor.nbytes > self._size:
                raise ValueError(f"tensor {tensor.name} from byte {tensor.at} to {tensor.at + tensor.nbytes}, and the "
                                 f"file has {self._size}")
        return GgufHeader(self._path, self._size, fields, located)

    def _tensor(self) -> GgufTensor:
        name = self._string(_KEY_BYTES)
        dimensions = self._number("<u4")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} of {dimensions} dimensions")
        shape = tuple(reversed([self._number("<u8") for _ in range(dimensions)]))
        kind, at = self._number("<u4"), self._number("<u8")
        if kind not in self._types:
            raise UsageError(f"{self._path}: tensor {name} is stored as type {kind}, which the package gguf does not "
                             "know: a newer gguf may know it")
        block = self._types[kind]
        if not all(0 < length < 1 << 48 for length in shape) or shape[-1] % block.values:
            raise ValueError(f"tensor {name} of shape {list(shape)} in {block.name}")
        return GgufTensor(name, shape, block, at)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string(self._remaining())
        if kind in _NUMBERS:
            number = self._number(_NUMBERS[kind])
            if _NUMBERS[kind] == "<f4":
                return float(str(np.float32(number)))  # 1e-05, as config.json has it, not 9.999999747378752e-06
            return bool(number) if kind == _BOOL else number
        if kind != _ARRAY:
            raise ValueError(f"a value of the type {kind}")
        inner = self._number("<u4")
        if inner == _STRING:
            return [self._string(self._remaining()) for _ in range(self._count(8))]
        if inner not in _NUMBERS:
            raise ValueError(f"an array of the type {inner}")
        dtype = np.dtype(_NUMBERS[inner])
        return np.frombuffer(self._bytes(self._count(dtype.itemsize) * dtype.itemsize), dtype)

    def _count(self, each: int) -> int:
        """Read how many items follow, of at least ``each`` bytes."""
        count: int = self._number("<u8")
        if count * each > self._remaining():
            raise ValueError(f"{count} items of {each} bytes or more, and {self._remaining()} bytes are left")
        return count

    def _string(self, most: int) -> str:
        length = self._number("<u8")
        if length > min(most, self._remaining()):
            raise ValueError(f"a text of {length} bytes, and {self._remaining()} bytes are left")
        return self._bytes(length).decode()

    def _number(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self._bytes(kind.itemsize), kind)[0].item()

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise ValueError(f"it ends after {self._size} bytes")
        return data

    def _remaining(self) -> int:
        return self._size - self._file.tell()


