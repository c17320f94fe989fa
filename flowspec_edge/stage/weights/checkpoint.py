"""The weights of a model directory by tensor name: safetensors, or PyTorch's ``.bin`` as a fallback."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.weights.files import INDEX, PICKLED, SAFE, WeightFile, file_errors, open_weights
from flowspec_edge.util.bounded_read import read_json

_SAMPLE = 1024  # elements at each end of a tensor that enter the digest
_PIECE = 2 << 20  # bytes of a tensor that are returned at a time
_MAPPED = 4 * _PIECE  # bytes read from a file before it is reopened to release its resident pages

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSlice:
    """Indexes [lo, hi) along ``dim`` of a tensor of ``shape``."""

    shape: torch.Size
    dim: int
    lo: int
    hi: int


@dataclass(frozen=True)
class TensorInfo:
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """UsageError if the directory holds no weights; FlowspecError for a damaged file or tensor."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UsageError(f"no model at {self.directory}: not a directory")
        self._files = self._locate()

    def __contains__(self, name: object) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        """All tensors, in the order of the files."""
        return list(self._files)

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """The named tensors as stored, memory-mapped if possible."""
        return self._read(names, _whole)

    def shapes(self, names: list[str]) -> dict[str, torch.Size]:
        """Reads only the files' headers."""
        return self._read(names, lambda file, name: file.shape(name))

    def stored(self, names: list[str]) -> dict[str, TensorInfo]:
        """Reads only the files' headers."""
        return self._read(names, lambda file, name: TensorInfo(file.shape(name), file.dtype(name)))

    def slices(self, wanted: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """As stored; reads only the slices.  FlowspecError if a tensor's shape differs from the slice's."""

        def read(file: WeightFile, name: str) -> Tensor:
            part = wanted[name]
            check_shape(self.directory, name, file.shape(name), part.shape)
            index = [slice(None)] * len(part.shape)
            index[part.dim] = slice(part.lo, part.hi)
            return file.read(name, tuple(index))

        return self._read(wanted, read)

    def pieces(self, name: str, rows: int = 0) -> Iterator[tuple[int, Tensor]]:
        """All rows of one tensor in pieces of ``rows`` (0: about 2 MB): (first row, rows as stored).

        A piece is mapped memory, valid until the next one.  A tensor without dimensions is one piece.  Tens
        of MB at most are resident.
        """
        path = self.file_of(name)
        with file_errors(path):
            file = open_weights(path)
            shape, read = file.shape(name), 0
            row_bytes = prod(shape[1:]) * file.dtype(name).itemsize
            step = rows or max(1, _PIECE // max(1, row_bytes))
            for lo in range(0, shape[0] if shape else 1, step):
                if read + step * row_bytes > _MAPPED:
                    file, read = open_weights(path), 0
                yield lo, file.read(name, (slice(lo, lo + step),) if shape else ())
                read += step * row_bytes

    def digest(self, names: Iterable[str]) -> str:
        return _digest(self._read(list(names), _ends))

    def _read(self, names: Iterable[str], read: Callable[[WeightFile, str], T]) -> dict[str, T]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of(name), []).append(name)
        found: dict[str, T] = {}
        for path, wanted in by_file.items():
            with file_errors(path):
                file = open_weights(path)
                for name in wanted:
                    found[name] = read(file, name)
        return {name: found[name] for name in names}

    def file_of(self, name: str) -> Path:
        """FlowspecError if there is no such tensor."""
        if name not in self._files:
            raise FlowspecError(f"{self.directory} has no tensor {name}: "
                                "the checkpoint is incomplete, or not of this architecture")
        return self._files[name]

    def _locate(self) -> dict[str, Path]:
        for single in (SAFE, PICKLED):
            index, path = self.directory / f"{single}{INDEX}", self.directory / single
            if index.is_file():
                return self._indexed(index)
            if path.is_file():
                with file_errors(path):
                    return dict.fromkeys(open_weights(path).names(), path)
        raise UsageError(f"no model at {self.directory}: neither {SAFE} nor {SAFE}{INDEX} nor {PICKLED} "
                         "is there")

    def _indexed(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = read_json(index)["weight_map"]
            files = {str(name): str(file) for name, file in weight_map.items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise FlowspecError(f"{index} is not a safetensors index: {error!r}") from error
        for file in files.values():
            if Path(file).name != file:
                raise FlowspecError(f"{index}: {file!r} is not the name of a file beside it")
        return {name: self.directory / file for name, file in files.items()}


def check_shape(directory: Path | str, name: str, stored: torch.Size, shape: torch.Size) -> None:
    """FlowspecError unless ``stored`` is the ``shape`` that the model's configuration requires."""
    if stored != shape:
        raise FlowspecError(f"{directory}: tensor {name} has shape {list(stored)}, "
                            f"config.json asks for {list(shape)}")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A fingerprint of stored tensors: sha256 over names, dtypes, shapes and both ends of each.

    It distinguishes models, layers and fine-tunes, but does not prove that a file is intact.
    """
    return _digest({name: (tensor.shape, tensor.flatten()[:_SAMPLE], tensor.flatten()[-_SAMPLE:])
                    for name, tensor in tensors.items()})


def _digest(ends: Mapping[str, tuple[torch.Size, Tensor, Tensor]]) -> str:
    sha = hashlib.sha256()
    for name in sorted(ends):
        shape, *samples = ends[name]
        sha.update(f"{name} {samples[0].dtype} {tuple(shape)}".encode())
        for sample in samples:
            sha.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _ends(file: WeightFile, name: str) -> tuple[torch.Size, Tensor, Tensor]:
    shape = file.shape(name)
    if not shape:
        value = _whole(file, name).clone().flatten()
        return shape, value, value
    rows = -(-_SAMPLE // max(1, prod(shape[1:])))
    first = file.read(name, (slice(0, min(rows, shape[0])),)).flatten()[:_SAMPLE]
    last = file.read(name, (slice(max(0, shape[0] - rows), shape[0]),)).flatten()[-_SAMPLE:]
    return shape, first.clone(), last.clone()


def _whole(file: WeightFile, name: str) -> Tensor:
    return file.read(name, (slice(None),) if file.shape(name) else ())
