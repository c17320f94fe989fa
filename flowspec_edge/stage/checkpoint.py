"""A model directory's safetensors, read tensor by tensor.

Knows single files and files with an index.  Reads only the tensors it is asked for.  Does not
know what a tensor is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLE = 1024  # elements at either end of a tensor that enter the digest

T = TypeVar("T")


@dataclass(frozen=True)
class Cut:
    """Indexes [lo, hi) along ``dim`` of a tensor that is stored with ``shape``."""

    shape: torch.Size
    dim: int
    lo: int
    hi: int


class Checkpoint:
    """The tensors of one model directory, by name.

    UsageError if the directory holds no safetensors; FlowspecError for a damaged file or tensor.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UsageError(f"no model at {self.directory}: not a directory")
        self._files = self._locate()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """The named tensors as stored, mapped from disk where the platform can."""
        return self._read(names, lambda file, name: file.get_tensor(name))

    def shapes(self, names: list[str]) -> dict[str, torch.Size]:
        """The named tensors' shapes, from the files' headers alone."""
        return self._read(names, lambda file, name: torch.Size(file.get_slice(name).get_shape()))

    def cuts(self, wanted: Mapping[str, Cut]) -> dict[str, Tensor]:
        """A part of each named tensor, as stored; no more than that is read.

        FlowspecError for a tensor of another shape than its cut says.
        """

        def read(file: Any, name: str) -> Tensor:
            cut, stored = wanted[name], file.get_slice(name)
            check_shape(self.directory, name, torch.Size(stored.get_shape()), cut.shape)
            index = [slice(None)] * len(cut.shape)
            index[cut.dim] = slice(cut.lo, cut.hi)
            part: Tensor = stored[tuple(index)]
            return part

        return self._read(wanted, read)

    def _read(self, names: Iterable[str], read: Callable[[Any, str], T]) -> dict[str, T]:
        """``read`` each tensor from its file, every file opened once."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name not in self._files:
                raise FlowspecError(f"{self.directory} has no tensor {name}: "
                                    "the checkpoint is incomplete, or not of this architecture")
            by_file.setdefault(self._files[name], []).append(name)
        found: dict[str, T] = {}
        for path, wanted in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in wanted:
                        found[name] = read(file, name)
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
        return {name: found[name] for name in names}

    def _locate(self) -> dict[str, Path]:
        """Tensor name -> file."""
        single, index = self.directory / _SINGLE, self.directory / _INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {name: self.directory / file for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise FlowspecError(f"{index} is not a safetensors index: {error!r}") from error
        if not single.is_file():
            raise UsageError(f"no model at {self.directory}: neither {_SINGLE} nor {_INDEX} is there")
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except (SafetensorError, OSError) as error:
            raise _damaged(single, error) from error


def check_shape(directory: Path | str, name: str, stored: torch.Size, shape: torch.Size) -> None:
    """FlowspecError unless the tensor has the ``shape`` that the model's configuration asks for."""
    if stored != shape:
        raise FlowspecError(f"{directory}: tensor {name} has shape {list(stored)}, "
                            f"config.json asks for {list(shape)}")


def digest(tensors: dict[str, Tensor]) -> str:
    """A fingerprint of stored tensors: sha256 over names, dtypes, shapes and both ends of each.

    Cheap: it tells models, layers and fine-tunes apart, but does not prove that a file is intact.
    """
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.flatten()
        for sample in (flat[:_SAMPLE], flat[-_SAMPLE:]):
            sha.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _damaged(path: Path, error: Exception) -> FlowspecError:
    if not path.is_file():
        return FlowspecError(f"{path} is missing: copy the model again")
    return FlowspecError(f"{path} is truncated or damaged ({error}): copy the model again")
