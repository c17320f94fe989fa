"""Weight files: safetensors, and PyTorch's own format through its weights-only loader.

Tensors are memory-mapped; touched pages count as resident until the file is closed and the tensors are gone.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowspec_edge.errors import FlowspecError

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"  # appended to either name: the file of each tensor


class WeightFile(Protocol):
    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> torch.Size: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """``tensor[index]``, with one slice per dimension."""


def open_weights(path: Path) -> WeightFile:
    """Open ``path`` by its suffix; garbage collection closes it.

    FlowspecError for a file that is missing, damaged, or in PyTorch's format from before version 1.6.
    """
    with file_errors(path):
        if path.suffix == ".safetensors":
            return _Safe(path)
        if path.is_file() and not zipfile.is_zipfile(path) and _starts_like_pickle(path):
            raise FlowspecError(f"{path} is in PyTorch's old format, which cannot be read piece by piece: "
                                "load the model with transformers and save it again as safetensors")
        return _Pickled(path)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn the libraries' exceptions about ``path`` into a FlowspecError that names it."""
    try:
        yield
    except pickle.UnpicklingError as error:  # its text advises to load the file with code execution
        raise FlowspecError(f"{path} is damaged, or holds more than tensors, which is not loaded because "
                            "it could run code: use the model's safetensors files") from error
    except (SafetensorError, EOFError, OSError, RuntimeError) as error:
        if not path.is_file():
            raise FlowspecError(f"{path} is missing: copy the model again") from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FlowspecError(f"{path} is truncated or damaged ({reason}): copy the model again") from error


class _Safe:
    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt")

    def names(self) -> Iterable[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        nothing = tuple(slice(0, 0) for _ in self.shape(name))
        return self.read(name, nothing).dtype

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._file.get_slice(name)[index] if index else self._file.get_tensor(name)
        return part


class _Pickled:
    def __init__(self, path: Path) -> None:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
            raise FlowspecError(f"{path} does not hold tensors by name: it is not a weight file")
        self._tensors: dict[str, Tensor] = held

    def names(self) -> Iterable[str]:
        return list(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        if name not in self._tensors:
            raise RuntimeError(f"File does not contain tensor {name}")
        return self._tensors[name].detach()[index] if index else self._tensors[name].detach()


def _starts_like_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] >= 2
