"""Which files of a directory hold a checkpoint's tensors, without torch.

Everything that reads weights asks here: targets, draft models, sharding and planning.  The order is that of
transformers: one safetensors file, the safetensors files of an index, one PyTorch file, the PyTorch files of
an index; then the table of a GGUF file's tensors.  A directory may hold more than one of them;
:func:`warn_of_unread` names what is not read.
"""

from __future__ import annotations

import json
import logging
import pickletools
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.bounded_read import read_json

log = logging.getLogger(__name__)

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"  # appended to either name: the file of each tensor
GGUF_TABLE = "model.gguf.json"  # where each tensor is in a GGUF file: ``model.gguf.home``
WEIGHTS = (SAFE, f"{SAFE}{INDEX}", PICKLED, f"{PICKLED}{INDEX}", GGUF_TABLE)  # in the order of preference
ADAPTER = "adapter_config.json"  # of a LoRA adapter, by peft
MANIFEST = "manifest.json"  # of a sharded model
_WEIGHT_FILE = re.compile(r"(model|pytorch_model)\b.*\.(safetensors|bin)")  # not Mistral's consolidated.*
_MOST_NAMES = 100_000_000  # bytes of a header
_MOST_LISTED = 3


@dataclass(frozen=True)
class LocatedWeights:
    """The files that hold a checkpoint's weights.

    source   the weight file, or the index
    files    that are read, each once
    indexed  the file of each tensor by the index; None: the file itself knows its tensors
    """

    source: Path
    files: tuple[Path, ...]
    indexed: dict[str, Path] | None = None


def altered(path: Path) -> FlowspecError:
    return FlowspecError(f"{path} has been altered: its sha256 is not the one in {MANIFEST}; copy it again")


def locate(directory: Path) -> LocatedWeights | None:
    """Return None if ``directory`` holds no weights.

    FlowspecError for an index that cannot be used, or that names a missing file.
    """
    for name in WEIGHTS:
        path = directory / name
        if path.is_file():
            return _by_index(path) if name.endswith(INDEX) else LocatedWeights(path, (path,))
    return None


def display_path(directory: Path) -> Path:
    """Return what users know a model's directory by: the GGUF file of which it was made, else itself."""
    try:
        return Path(read_json(directory / GGUF_TABLE)["files"][0]["path"])
    except (FlowspecError, TypeError, LookupError):  # there is no table, or a damaged one, which others refuse
        return directory


def _by_index(index: Path) -> LocatedWeights:
    try:
        names = {str(tensor): str(file) for tensor, file in read_json(index)["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise FlowspecError(f"{index} is not an index of weights: {error!r}") from error
    for file in dict.fromkeys(names.values()):
        if Path(file).name != file:
            raise FlowspecError(f"{index}: {file!r} is not the name of a file beside it")
        if not (index.parent / file).is_file():
            raise FlowspecError(f"{index.parent / file} is missing, which {index.name} names: copy the model "
                                "again")
    indexed = {tensor: index.parent / file for tensor, file in names.items()}
    return LocatedWeights(index, tuple(dict.fromkeys(indexed.values())), indexed)


def warn_of_unread(directory: Path) -> None:
    """Warn once, in one line each, of files that look like weights of the model and are not read."""
    location = locate(directory)
    if location is None:
        return
    others = sorted(path.name for path in directory.iterdir() if path not in location.files
                    and path.suffix == location.files[0].suffix and _WEIGHT_FILE.fullmatch(path.name))
    index = directory / f"{location.source.name}{INDEX}"
    if index.is_file() and {path.name for path in _files_of(index)} != {location.source.name}:
        others.insert(0, index.name)
    if others:
        warn_once(f"{directory}: the weights are those of {location.source.name}; not read: {_listed(others)}; "
              "delete what is out of date")
    if (directory / ADAPTER).is_file():
        warn_once(f"{directory}: the weights are those of {location.source.name}; the adapter beside them "
              f"({ADAPTER}) is not applied: merge it into the model first")


def is_weight_file(path: Path) -> bool:
    """Whether it holds weights, or is an index of them, read or not."""
    return path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or path.name.endswith(INDEX)


def _files_of(index: Path) -> list[Path]:
    try:
        return [Path(str(name)) for name in read_json(index)["weight_map"].values()]
    except (FlowspecError, KeyError, TypeError, AttributeError):
        return []


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


@cache
def warn_once(message: str) -> None:
    log.warning("%s", message)


def stored_names(directory: Path) -> frozenset[str]:
    """Return the names of the tensors in ``directory``, from an index or from headers.

    The set is empty if there are no weights, or if they cannot be read. For a PyTorch file it has further strings.
    """
    try:
        location = locate(directory)
        if location is None:
            return frozenset()
        return frozenset(location.indexed or _names_in(location.source))
    except (FlowspecError, OSError, ValueError, TypeError, zipfile.BadZipFile):
        return frozenset()


def _names_in(path: Path) -> Iterator[str]:
    if path.name == GGUF_TABLE:
        yield from read_json(path)["tensors"]
        return
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            yield from json.loads(file.read(min(size, _MOST_NAMES)))
        return
    with zipfile.ZipFile(path) as archive:  # nothing is unpickled: only the strings are looked at
        for name in archive.namelist():
            if name.endswith("/data.pkl"):
                data = archive.read(name)[:_MOST_NAMES]
                yield from (text for _, text, _ in pickletools.genops(data) if isinstance(text, str))
