"""Files of weights, read by tensor and row: the interface, and safetensors.

Token embeddings stay in their file. The table of a vocabulary of 152,000 tokens takes 1.6 GB at a width of
5,120, and a segment needs sixteen rows of it. They are read with pread, not through a mapping: a file that
is cut short is then an error with a name, where a mapping would end the process with SIGBUS.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.util.bounded_read import PIECE, UncachedFile
from flowspec_edge.util.tensors import check_finite, to_device

SAFETENSORS = ".safetensors"  # the suffix
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}
_MOST_HEADER = 100_000_000  # bytes, as the safetensors library allows
MTP = "mtp."  # names of a model's own MTP layer begin so
_WITHIN = "model.language_model."  # a multimodal checkpoint's language model
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class TensorInfo:
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """A tensor without dimensions is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize


class WeightFile(ABC):
    """A file of weights; ``tensors``: by name, in the order of the file."""

    path: Path
    tensors: dict[str, TensorInfo]

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names from now on: ``names`` maps stored names to those."""
        self.tensors = {names.get(name, name): info for name, info in self.tensors.items()}

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's dtype and shape; FlowspecError if there is no such tensor."""
        if name not in self.tensors:
            raise FlowspecError(f"{self.path} does not hold tensor {name}: copy the model again")
        return self.tensors[name]

    @abstractmethod
    def read(self, name: str, lo: int = 0, hi: int | None = None, buffer: Tensor | None = None) -> Tensor:
        """Rows [lo, hi) of a tensor on the CPU as stored, by default all.

        In ``buffer``, uint8, if that is given and the file has to be copied.
        """

    def pieces(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield a whole tensor by ``rows`` (0: at most ``PIECE`` bytes, or one row) at a time: (first row, rows).

        A piece is valid until the next one. A tensor without dimensions is one piece.

        ``buffer``: uint8, for pieces that fit; one of every tensor's own, freed between tensors that stay,
        leaves holes in memory.
        """
        info = self.info(name)
        step = min(rows or max(1, PIECE // max(1, info.row_bytes)), max(1, info.rows))
        if buffer is None or len(buffer) < step * info.row_bytes:
            buffer = torch.empty(step * info.row_bytes, dtype=torch.uint8, device="cpu")
        for lo in range(0, info.rows, step):
            yield lo, self.read(name, lo, min(lo + step, info.rows), buffer)


class SafetensorsFile(WeightFile):
    """Reads past the page cache."""

    def __init__(self, path: Path, hashed: bool = False) -> None:
        """Open a file; FlowspecError if the header does not describe all of it; ``hashed`` as for UncachedFile."""
        self.path = path
        self.file = UncachedFile(path, hashed)
        self._starts: dict[str, int] = {}
        try:
            length = int.from_bytes(self._bytes(0, 8), "little")
            if length > min(_MOST_HEADER, self.file.size - 8):
                raise ValueError(f"a header of {length} bytes")
            self._describe(json.loads(self._bytes(8, length)), 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FlowspecError(f"{path} is truncated or damaged ({error}): copy the model again") from error

    def read(self, name: str, lo: int = 0, hi: int | None = None, buffer: Tensor | None = None) -> Tensor:
        info = self.info(name)
        count = (info.rows if hi is None else hi) - lo
        if buffer is None:
            buffer = torch.empty(count * info.row_bytes, dtype=torch.uint8, device="cpu")
        data = buffer[: count * info.row_bytes]
        self.file.read_into(data.numpy().data, self.start(name) + lo * info.row_bytes)
        return data.view(info.dtype).view(count, *info.shape[1:]) if info.shape else data.view(info.dtype)[0]

    def rename(self, names: Mapping[str, str]) -> None:
        super().rename(names)
        self._starts = {names.get(name, name): start for name, start in self._starts.items()}

    def start(self, name: str) -> int:
        """Return the tensor's first byte."""
        return self._starts[name]

    def view(self, name: str, source: str, at: int, shape: Sequence[int]) -> None:
        """Let ``name`` stand for ``shape`` values of tensor ``source``, from its value ``at`` on."""
        info = self.info(source)
        self.tensors[name] = TensorInfo(torch.Size(shape), info.dtype)
        self._starts[name] = self._starts[source] + at * info.dtype.itemsize

    def _bytes(self, at: int, count: int) -> bytes:
        if at + count > self.file.size:
            raise ValueError(f"{self.file.size} bytes")
        data = bytearray(count)
        self.file.read_into(memoryview(data), at)
        return bytes(data)

    def _describe(self, fields: dict[str, dict[str, Any]], at: int) -> None:
        """Tensors follow one another without gaps up to the file's end, as the format demands."""
        fields.pop("__metadata__", None)
        self.tensors, self._starts = {}, {}
        begin = at
        for name, entry in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
            shape, kind = entry["shape"], entry["dtype"]
            if kind not in DTYPES:
                raise FlowspecError(f"{self.path}: tensor {name} is stored as {kind!r}, which cannot be read")
            if not (isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)):
                raise ValueError(f"tensor {name} of shape {shape}")
            info = TensorInfo(torch.Size(shape), DTYPES[kind])
            self.tensors[name], self._starts[name] = info, at
            if entry["data_offsets"] != [at - begin, at - begin + info.nbytes]:
                raise ValueError(f"tensor {name} at {entry['data_offsets']}")
            at += info.nbytes
        if at != self.file.size:
            raise ValueError(f"{self.file.size} bytes, and tensors up to {at}")


def is_written_otherwise(name: str) -> bool:
    """Whether :func:`use_own_names` changes it."""
    return name.startswith(_WITHIN) or (name.startswith(MTP) and _STACKED.fullmatch(name) is not None)


def use_own_names(file: WeightFile) -> None:
    """Name a file's tensors as a decoder's are here.

    Names lose the place of a language model in a multimodal checkpoint. A layer's stacked experts, [experts, 2 inner,
    width] for gate and up, [experts, width, inner] for down, become matrices of their own.

    Sources: transformers' conversions of ``qwen3_5_text`` and ``qwen2_moe``; the names in Qwen3.5-35B-A3B.
    """
    if not isinstance(file, SafetensorsFile) or not any(map(is_written_otherwise, file.tensors)):
        return
    for stored in list(filter(is_written_otherwise, file.tensors)):
        within, shape = stored.startswith(_WITHIN), file.info(stored).shape
        name = f"model.{stored.removeprefix(_WITHIN)}" if within else stored
        stacked = _STACKED.fullmatch(name)
        if stacked is not None and len(shape) == 3:
            block, matrices = stacked.groups()
            names = ("gate_proj", "up_proj") if matrices == "gate_up_proj" else ("down_proj",)
            experts, rows, columns = shape[0], shape[1] // len(names), shape[2]
            for i, (expert, matrix) in enumerate(product(range(experts), names)):
                file.view(f"{block}.{expert}.{matrix}.weight", stored, i * rows * columns, (rows, columns))
        elif within:
            file.view(name, stored, 0, shape)
        else:
            continue  # a loader misses its experts
        del file.tensors[stored]


_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
           torch.float8_e5m2)


class EmbeddingTable(nn.Module):
    """In place of ``nn.Embedding``, without weights in memory.

    num_embeddings, embedding_dim  V and H
    """

    _like: Tensor  # empty; its dtype and device are those of the rows, and follow ``to``

    def __init__(self, file: SafetensorsFile, name: str, dtype: torch.dtype,
                 device: torch.device | str = "cpu") -> None:
        """Tensor ``name`` [V, H], which is read once; rows are returned in ``dtype`` on ``device``.

        FlowspecError if ``file`` does not hold it, or values that are not finite in ``dtype``.
        """
        super().__init__()
        self._file, self._path, info = file.file, file.path, file.info(name)
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        if len(info.shape) != 2 or not info.nbytes or info.dtype not in _DTYPES:
            raise FlowspecError(f"{file.path}: tensor {name}, {info.dtype} {list(info.shape)}, is no table "
                                "of embeddings: copy the model again")
        self.num_embeddings, self.embedding_dim = info.shape
        self._stored, self._row_bytes, self._start = info.dtype, info.row_bytes, file.start(name)
        self._state = self._now()
        for _, rows in file.pieces(name):
            check_finite(rows, dtype, f"{file.path}: tensor {name}")

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows [..., H] of ``tokens`` [...], int64, which are waited for on a GPU.

        FlowspecError if the file has changed since it was opened, or cannot be read.
        """
        if self._now() != self._state:
            raise FlowspecError(f"{self._path} has changed while its embeddings were in use: restart with "
                                "the whole file, and replace files by renaming new ones")
        data = bytearray().join(self._rows(tokens.flatten().tolist()))
        rows = torch.frombuffer(data, dtype=self._stored) if data else torch.empty(0, dtype=self._stored)
        shape = (*tokens.shape, self.embedding_dim)
        assert rows.numel() == prod(shape)
        return to_device(rows.view(shape).to(self._like.dtype), self._like.device)

    def _rows(self, tokens: list[int]) -> Iterable[bytes]:
        for token in tokens:
            if not 0 <= token < self.num_embeddings:
                raise ProtocolError(f"token {token} is outside the vocabulary of {self.num_embeddings}")
            try:
                row = os.pread(self._file.fileno(), self._row_bytes, self._start + token * self._row_bytes)
            except OSError as error:
                raise FlowspecError(f"cannot read the embedding of token {token} from {self._path}: "
                                    f"{error.strerror}; see to the disk, then restart") from error
            if len(row) < self._row_bytes:
                raise FlowspecError(f"{self._path} was cut short while its embeddings were in use: copy the "
                                    "model again, then restart")
            yield row

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns


Embedding = nn.Embedding | EmbeddingTable


def as_embedding(embedding: Tensor | Embedding) -> Embedding:
    """Return a tensor [V, H] as a module."""
    return nn.Embedding.from_pretrained(embedding) if isinstance(embedding, Tensor) else embedding


def random_embedding(rows: int, width: int) -> nn.Embedding:
    """Return a module with random rows, which takes no memory on the meta device.

    Where ``nn.Embedding`` draws them itself, it imports torch._dynamo on that device: a second.
    """
    return nn.Embedding(rows, width, _weight=torch.randn(rows, width))


def tokens_device(embedding: nn.Module, device: torch.device) -> torch.device:
    """Where ``embedding``, whose rows go to ``device``, wants the tokens."""
    return torch.device("cpu") if isinstance(embedding, EmbeddingTable) else device
