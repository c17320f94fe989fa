"""The weights of a model directory by tensor name, in the files that ``located`` names.

Stacked experts one by one (``stacked``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.weights.files import WeightFiles
from flowspec_edge.model.weights.gguf_file import GgufFile
from flowspec_edge.model.weights.located import INDEX, PICKLED, SAFE, display_path, locate
from flowspec_edge.model.weights.stacked import StackedExperts, stacks
from flowspec_edge.util.weight_file import (
    MTP,
    EmbeddingTable,
    SafetensorsFile,
    TensorInfo,
    WeightFile,
    is_written_otherwise,
    use_own_names,
)

_SAMPLE = 1024  # elements at each end of a tensor that enter the digest


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which ``read`` reads: a head in 16 bits never has to be in memory as a whole."""

    shape: torch.Size
    read: Callable[[], Tensor]


class Checkpoint:
    """UsageError if the directory holds no weights; FlowspecError for a damaged file or tensor."""

    def __init__(self, directory: Path | str, files: WeightFiles | None = None) -> None:
        """Open a checkpoint; ``files`` opens its files: by default, without a comparison of their sha256."""
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UsageError(f"no model at {self.directory}: not a directory")
        self._weights = files or WeightFiles()
        self._stores = self._locate()  # the file of each stored tensor
        self._files = dict(self._stores)
        self._stacked: dict[str, StackedExperts] = {}
        for prefix, names in stacks(self._stores).items():
            experts = StackedExperts(prefix, names, self._store)
            self._stacked |= dict.fromkeys(experts.tensors, experts)
            self._files |= dict.fromkeys(experts.tensors, experts.path)
            for name in names:
                del self._files[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    @cached_property
    def display_path(self) -> Path:
        """What messages call it: a GGUF file, or the directory."""
        return display_path(self.directory)

    @property
    def names(self) -> list[str]:
        """All tensors, in the order of the files."""
        return list(self._files)

    @property
    def gguf(self) -> GgufFile | None:
        """The GGUF file that holds the tensors; None if files of another format do."""
        file = self._weights.open(path) if (path := next(iter(self._files.values()), None)) else None
        return file if isinstance(file, GgufFile) else None

    def in_file_order(self, names: Collection[str]) -> list[str]:
        """Read in this order, no file is read twice."""
        files = dict.fromkeys(self.file_of(name) for name in names)
        return [name for file in files for name in file.tensors
                if name in names and self._files[name] == file.path]

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the named tensors as stored."""
        return {name: self.file_of(name).read(name) for name in names}

    def stored(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Return the tensors' dtypes and shapes; reads only the files' headers."""
        return {name: self.file_of(name).info(name) for name in names}

    def lazy(self, names: Iterable[str]) -> dict[str, StoredTensor]:
        """Describe the named tensors, with what reads each; reads only the files' headers."""
        return {name: StoredTensor(info.shape, partial(self.file_of(name).read, name))
                for name, info in self.stored(names).items()}

    def table(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu"
              ) -> EmbeddingTable | None:
        """Open embeddings of ``shape`` whose rows stay in the file; None if that is not a safetensors file."""
        file = self.file_of(name)
        if not isinstance(file, SafetensorsFile):
            return None
        check_shape(self.directory, name, file.info(name).shape, shape)
        return EmbeddingTable(file, name, dtype, device)

    def pieces(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """All rows of one tensor in pieces of ``rows`` (0: some MB): (first row, rows as stored).

        A piece is valid until the next one.  A tensor without dimensions is one piece.  ``buffer`` as for
        ``WeightFile.pieces``.
        """
        return self.file_of(name).pieces(name, rows, buffer)

    def digest(self, names: Iterable[str]) -> str:
        stored: set[str] = set()
        for name in names:
            self.path_of(name)
            stored.update(self._stacked[name].sources(name) if name in self._stacked else [name])
        return _digest({name: _ends(self._store(name), name) for name in stored})

    def file_of(self, name: str) -> WeightFile:
        """Return a tensor's file; FlowspecError if there is no such tensor, or its file cannot be read."""
        self.path_of(name)
        return self._stacked.get(name) or self._store(name)

    def _store(self, name: str) -> WeightFile:
        file = self._weights.open(self._stores[name])
        file.info(name)
        return file

    def path_of(self, name: str) -> Path:
        """Return the path of a tensor's file; FlowspecError if there is no such tensor."""
        if name not in self._files:
            raise missing_tensor(self.directory, name)
        return self._files[name]

    def _locate(self) -> dict[str, Path]:
        location = locate(self.directory)
        if location is None:
            raise UsageError(f"no model at {self.directory}: neither {SAFE} nor {SAFE}{INDEX} nor {PICKLED} "
                             "is there")
        if location.indexed is None or any(map(is_written_otherwise, location.indexed)):
            paths = self._paths_by_name(location.files)
        else:
            paths = location.indexed
        if _is_bare_decoder(paths):
            paths = self._with_decoder_prefix(paths)
        if _has_embeddings_as_output(paths):
            paths = self._renamed(paths, {"lm_head.weight": "model.embed_tokens.weight"})
        return paths

    def _paths_by_name(self, paths: Iterable[Path]) -> dict[str, Path]:
        paths_by_name: dict[str, Path] = {}
        for path in paths:
            file = self._weights.open(path)
            use_own_names(file)
            paths_by_name |= dict.fromkeys(file.tensors, path)
        return paths_by_name

    def _with_decoder_prefix(self, paths: Mapping[str, Path]) -> dict[str, Path]:
        """Name a bare decoder's tensors as a causal language model's; transformers loads either."""
        names = {name: name if name.startswith(_BESIDE_THE_DECODER) else f"model.{name}" for name in paths}
        return self._renamed(paths, names)

    def _renamed(self, paths: Mapping[str, Path], names: Mapping[str, str]) -> dict[str, Path]:
        for path in dict.fromkeys(paths.values()):
            self._weights.open(path).rename(names)
        return {names.get(name, name): path for name, path in paths.items()}


# Tensors of a causal language model that are not its decoder's.
_BESIDE_THE_DECODER = ("lm_head.", MTP)


def _is_bare_decoder(names: Collection[str]) -> bool:
    """Whether a decoder was saved without the language model around it: no name begins with "model.".

    Draft models look alike, but have fc (heads of EAGLE, block drafters), or no embeddings.
    """
    return ({"embed_tokens.weight", "layers.0.input_layernorm.weight"} <= set(names)
            and "fc.weight" not in names and not any(name.startswith("model.") for name in names))


def _has_embeddings_as_output(names: Collection[str]) -> bool:
    """Whether the one matrix of a model that ties its embeddings has the name of the output matrix.

    transformers loads either name. A model that does not tie them misses one, whatever it is called.
    """
    return ("lm_head.weight" in names and "model.embed_tokens.weight" not in names
            and "model.layers.0.input_layernorm.weight" in names)


def missing_tensor(directory: Path, name: str) -> FlowspecError:
    directory = display_path(directory)
    if name == "lm_head.weight":
        return FlowspecError(f"{directory} has no tensor {name}, and config.json does not tie it to the "
                             "embeddings: save the whole language model (…ForCausalLM), not its decoder")
    return FlowspecError(f"{directory} has no tensor {name}: the checkpoint is incomplete, or not of this "
                         "architecture")


def check_shape(directory: Path, name: str, stored: torch.Size, shape: torch.Size) -> None:
    """Raise FlowspecError unless ``stored`` is the ``shape`` that the model's configuration requires."""
    if stored != shape:
        raise FlowspecError(f"{display_path(directory)}: tensor {name} has shape {list(stored)}, "
                            f"config.json asks for {list(shape)}")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a fingerprint of stored tensors: sha256 over names, dtypes, shapes and both ends of each.

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
    info = file.info(name)
    rows = -(-_SAMPLE // max(1, prod(info.shape[1:])))
    first = file.read(name, 0, min(rows, info.rows)).flatten()[:_SAMPLE]
    last = file.read(name, max(0, info.rows - rows), info.rows).flatten()[-_SAMPLE:]
    return info.shape, first.clone(), last.clone()
