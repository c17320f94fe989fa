"""A model's weight files, opened for one reading and compared with the manifest's digests afterwards.

Safetensors and GGUF files are copied past the page cache.  PyTorch's own format is memory-mapped by its weights-only
loader.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, first_line
from flowspec_edge.model.weights.gguf_file import GgufFile
from flowspec_edge.model.weights.located import GGUF_TABLE, altered
from flowspec_edge.util.bounded_read import sha256_of
from flowspec_edge.util.weight_file import SAFETENSORS, SafetensorsFile, TensorInfo, WeightFile

# Entries of a training checkpoint that hold the weights, when these are not the file itself.
_NESTED = ("state_dict", "model_state_dict", "model", "module")


class WeightFiles:
    """Opens each file once."""

    def __init__(self, sha256: Mapping[Path, str] | None = None) -> None:
        """Set up without open files; ``sha256``: of the files that have to be compared."""
        self._digests = sha256 or {}
        self._open: dict[Path, WeightFile | None] = {}

    def open(self, path: Path) -> WeightFile:
        """Open a file; FlowspecError if it is missing, damaged, or of PyTorch's format from before version 1.6."""
        if (file := self._open.get(path)) is None:
            self._open[path] = None  # begun, should it fail
            self._open[path] = file = _open(path, path in self._digests)
        return file

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare the files' sha256 after the block, all of them, whether the block has read them or not.

        FlowspecError that names one that was altered, also instead of an error that follows from it.
        """
        self._compare(path for path in self._digests if path.suffix != SAFETENSORS)
        try:
            yield
        except Exception:
            self._compare(path for path in self._open if path in self._digests)
            raise
        self._compare(path for path in self._digests if path.suffix == SAFETENSORS)

    def _compare(self, paths: Iterable[Path]) -> None:
        for path in paths:
            file = self._open.get(path)
            digest = file.file.sha256() if isinstance(file, SafetensorsFile) else sha256_of(path)
            if digest != self._digests[path]:
                raise altered(path)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn torch's exceptions about ``path`` into a FlowspecError that names it."""
    try:
        yield
    except pickle.UnpicklingError as error:  # its text advises to load the file with code execution
        raise FlowspecError(f"{path} is damaged, or holds more than tensors, which is not loaded because "
                            "it could run code: use the model's safetensors files") from error
    except (EOFError, OSError, RuntimeError) as error:
        raise FlowspecError(f"{path} is truncated or damaged ({first_line(error)}): copy the model again"
                            ) from error


class _PickledFile(WeightFile):
    def __init__(self, path: Path) -> None:
        self.path = path
        with file_errors(path):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        values = _by_name(content)
        if values is None:
            raise FlowspecError(f"{path} does not hold tensors by name: it is not a weight file")
        self._values: dict[str, Tensor] = values
        self.tensors = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in values.items()}

    def rename(self, names: Mapping[str, str]) -> None:
        super().rename(names)
        self._values = {names.get(name, name): tensor for name, tensor in self._values.items()}

    def read(self, name: str, lo: int = 0, hi: int | None = None, buffer: Tensor | None = None) -> Tensor:
        tensor = self._values[name].detach()
        return tensor[lo:hi] if tensor.shape else tensor


def _by_name(content: object) -> dict[str, Tensor] | None:
    """Return the mapping from names to tensors in a file's ``content``; None if there is no such mapping.

    It is the whole content, or one of its values.  Training frameworks nest it so, beside other things.
    """
    if not isinstance(content, Mapping):
        return None
    if all(isinstance(value, Tensor) for value in content.values()):
        return dict(content)
    return next((nested for key in _NESTED if (nested := _by_name(content.get(key)))), None)


def _open(path: Path, hashed: bool) -> WeightFile:
    if not path.is_file():
        raise FlowspecError(f"{path} is missing: copy the model again")
    if path.suffix == SAFETENSORS:
        return SafetensorsFile(path, hashed)
    if path.name == GGUF_TABLE:
        return GgufFile(path)
    if not zipfile.is_zipfile(path) and _starts_like_pickle(path):
        raise FlowspecError(f"{path} is in PyTorch's old format, which cannot be read piece by piece: "
                            "load it with torch.load and save it again, as safetensors or in a newer format")
    return _PickledFile(path)


def _starts_like_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] >= 2
