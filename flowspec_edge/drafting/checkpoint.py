"""Files of draft models: config.json and weights."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PretrainedConfig

from flowspec_edge.errors import FlowspecError, UsageError, first_line, last_line
from flowspec_edge.model.catalogue import find_known
from flowspec_edge.model.draft_formats import FORMATS, recognise_format
from flowspec_edge.model.modeldir import BLOCKS, check_config
from flowspec_edge.util.bounded_read import read_json, read_json_object
from flowspec_edge.util.tensors import check_finite
from flowspec_edge.util.weight_file import (
    SAFETENSORS,
    Embedding,
    EmbeddingTable,
    SafetensorsFile,
    use_own_names,
)

_Module = TypeVar("_Module", bound=nn.Module)
_Config = TypeVar("_Config", bound=PretrainedConfig)

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
_COMPUTED = "rotary_emb.inv_freq"  # stored by old releases of transformers; it follows from the config
_PREFIXES = ("module.", "model.")  # of a training framework's wrapper, and of a whole model


def read_config(directory: Path, what: str, blocks: bool = False) -> dict[str, Any]:
    """UsageError if config.json is missing or invalid, FlowspecError if it is of a format that cannot be run;
    ``what``: the model's name with its article; ``blocks``: it may be a block drafter."""
    path = directory / "config.json"
    if not path.exists():
        raise UsageError(f"no {_bare(what)} at {directory}: config.json is missing")
    raw = read_json_object(path)
    check_config(raw, path)
    name = recognise_format(raw)
    if name == "MTP":
        raise FlowspecError(f"{path}: an MTP layer is not read from a directory of its own, only from its "
                            "model's checkpoint: --draft mtp with a model that has one")
    if name is not None and FORMATS.get(name) is None:
        raise FlowspecError(f"{path}: draft heads in the format {name} cannot be run, those of EAGLE-1, 2 "
                            f"and 3, DFlash, DFlash2, DSpark and JetSpec can; {_instead(raw)}")
    if name is not None and (kind := FORMATS[name]) in BLOCKS and not blocks:
        raise FlowspecError(f"{path}: a head in the format {name} is a draft model of the kind {kind}: it "
                            f"belongs in a directory {kind}/")
    return raw


def _instead(raw: dict[str, Any]) -> str:
    """The heads of the model that a config.json names, or where to look."""
    inner = raw.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, dict) else None
    target = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    target = target or raw.get("target_model_name_or_path")
    known = find_known(target) if isinstance(target, str) else None
    if known is None:
        return "what there is for a model: flowspec models head MODEL"
    heads = ", ".join(head.repository for head in known[1].runnable) or "none"
    return f"published for {target}: {heads}"


EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class StoredTensor:
    """``read`` reads it: a head in 16 bits never has to be in memory as a whole."""

    shape: torch.Size
    read: Callable[[], Tensor]


def config_of(kind: type[_Config], fields: dict[str, Any], directory: Path) -> _Config:
    """FlowspecError for fields of ``directory``'s config.json that do not go together."""
    try:
        return cast(_Config, kind.from_dict(fields))
    except Exception as error:  # transformers and huggingface_hub raise many kinds of errors
        raise FlowspecError(f"{directory / 'config.json'}: {last_line(error)}") from error


def has_embedding(directory: Path) -> bool:
    """Whether a head's one safetensors file holds its embeddings.  FlowspecError for a damaged one."""
    path = directory / SAFE
    return path.exists() and any(_plain(name) == EMBEDDING for name in SafetensorsFile(path).tensors)


def own_embedding(directory: Path, config: PretrainedConfig, dtype: torch.dtype) -> EmbeddingTable | None:
    """A head's own embeddings, in their file; None if it has none, or not in one safetensors file.
    FlowspecError for another shape than ``config``'s."""
    path = directory / SAFE
    if not path.exists():
        return None
    file = SafetensorsFile(path)
    names = [name for name in file.tensors if _plain(name) == EMBEDDING]
    if not names:
        return None
    table = EmbeddingTable(file, names[0], dtype)
    shape, wanted = [table.num_embeddings, table.embedding_dim], [config.vocab_size, config.hidden_size]
    if shape != wanted:
        raise FlowspecError(f"{directory}: tensor {EMBEDDING} has shape {shape}, config.json asks for "
                            f"{wanted}")
    return table


def read_weights(directory: Path, what: str, embedding: bool = True) -> dict[str, StoredTensor]:
    """Safetensors before ``.bin``, one file before shards with an index; without EMBEDDING unless
    ``embedding``.  UsageError if there are none, FlowspecError if they are unreadable."""
    for name in (SAFE, f"{SAFE}.index.json", PICKLED, f"{PICKLED}.index.json"):
        path = directory / name
        if path.exists():
            files = _shards(path) if name.endswith(".json") else [path]
            return {key: tensor for file in files for key, tensor in _read(file, embedding).items()}
    raise UsageError(f"no {_bare(what)} at {directory}: neither {SAFE} nor {PICKLED} is there")


def plain_names(weights: dict[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    """Strip the prefixes of names and drop computed tensors; FlowspecError if two names collide."""
    plain: dict[str, StoredTensor] = {}
    for stored, tensor in weights.items():
        name = _plain(stored)
        if name.endswith(_COMPUTED):
            continue
        if name in plain:
            raise FlowspecError(f"{directory}: tensor {name} is stored twice, also as {stored}")
        plain[name] = tensor
    return plain


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError) as error:
        raise FlowspecError(f"{index} is not an index of weights: {error!r}") from None
    for name in names:
        if Path(name).name != name:
            raise FlowspecError(f"{index}: {name!r} is not the name of a file beside it")
    return [index.parent / name for name in names]


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _read(path: Path, embedding: bool) -> dict[str, StoredTensor]:
    if not path.exists():
        raise FlowspecError(f"{path} is missing: copy the draft model again")
    if path.suffix == SAFETENSORS:
        file = SafetensorsFile(path)
        use_own_names(file)
        return {name: StoredTensor(info.shape, partial(file.read, name))
                for name, info in file.tensors.items() if embedding or _plain(name) != EMBEDDING}
    with _readable(path):
        held = dict(torch.load(path, map_location="cpu", weights_only=True))
        return {name: StoredTensor(tensor.shape, partial(held.__getitem__, name))
                for name, tensor in held.items()}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """FlowspecError for what PyTorch raises."""
    try:
        yield
    except pickle.UnpicklingError as error:  # its text advises to load the file with code execution
        raise FlowspecError(f"{path} cannot be read as weights: it is damaged, or holds more than "
                            "tensors, which is not loaded because it could run code") from error
    except Exception as error:  # of many kinds, for a bad file
        raise FlowspecError(f"{path} cannot be read as weights: {first_line(error)}") from error


def on_meta(kind: Callable[[_Config], _Module], config: _Config) -> _Module:
    """On the meta device, without memory."""
    with torch.device("meta"):
        return kind(config)


def build(kind: Callable[[_Config], _Module], config: _Config, weights: dict[str, StoredTensor],
          directory: Path, what: str, dtype: torch.dtype, embedding: Embedding | None = None,
          quantise: Callable[[nn.Module], None] = lambda module: None) -> _Module:
    """A module of ``weights``, as :func:`_assign` checks them; ``embedding`` stands for its own.

    ``quantise``, called after each tensor with the parent of its linear, may replace complete linears in it.
    """
    module = on_meta(kind, config)
    if embedding is not None:
        module.embed_tokens = nn.Identity()  # without weights
    _assign(module, weights, directory, what, dtype, quantise)
    if embedding is not None:
        module.embed_tokens = embedding.to(dtype)  # not copied
    rotary: Any = type(module.rotary_emb)
    module.rotary_emb = rotary(config)  # its buffers are computed, not stored
    return module.eval()


def _assign(module: nn.Module, weights: dict[str, StoredTensor], directory: Path, what: str,
            dtype: torch.dtype, quantise: Callable[[nn.Module], None]) -> None:
    """Replace all parameters by ``weights`` in ``dtype``; integer and bool tensors keep theirs.
    FlowspecError that names a missing, unexpected or misshapen tensor, or one of another kind."""
    held = module.state_dict()
    wanted = {name: tuple(w.shape) for name, w in held.items()}
    for name in wanted:
        if name not in weights:
            raise FlowspecError(f"{directory}: tensor {name} is missing from the {_bare(what)}")
    for name, weight in weights.items():
        if name not in wanted:
            raise FlowspecError(f"{directory}: tensor {name} does not belong in {what}")
        if tuple(weight.shape) != wanted[name]:
            raise FlowspecError(
                f"{directory}: tensor {name} has shape {list(weight.shape)}, "
                f"config.json asks for {list(wanted[name])}"
            )
    # The largest first: what is quantised before the last ones is smaller than they are.
    for name in sorted(weights, key=lambda name: -prod(wanted[name])):
        tensor = weights[name].read()
        if tensor.is_floating_point() != held[name].is_floating_point():
            raise FlowspecError(f"{directory}: tensor {name} holds {tensor.dtype}, not {held[name].dtype}")
        check_finite(tensor, dtype, f"{directory}: tensor {name}")
        placed = tensor.to(dtype if tensor.is_floating_point() else held[name].dtype)
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).load_state_dict({leaf: placed}, strict=False, assign=True)
        del tensor, placed
        quantise(module.get_submodule(owner.rpartition(".")[0]))  # a layer with experts has a thousand others


def write(directory: Path, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Floating-point tensors are stored in ``dtype``, others as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: w.detach().to("cpu", dtype if w.is_floating_point() else w.dtype).contiguous()
              for name, w in weights.items()}
    try:
        safetensors.torch.save_file(stored, directory / SAFE, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise FlowspecError(f"cannot write {directory / SAFE}: {first_line(error)}; free some space and run "
                            "this again") from error
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _bare(what: str) -> str:
    return what.split(" ", 1)[1]
