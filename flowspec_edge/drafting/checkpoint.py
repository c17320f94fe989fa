"""Files of draft models: config.json and weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, UsageError, first_line
from flowspec_edge.model.catalogue import find_known_model
from flowspec_edge.model.config import check_config
from flowspec_edge.model.decoder_config import DecoderConfig, decoder_config
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import kind_of_format, recognise_format
from flowspec_edge.model.families import Family
from flowspec_edge.model.recognise import describe
from flowspec_edge.model.weights.checkpoint import Checkpoint, StoredTensor
from flowspec_edge.model.weights.located import PICKLED, SAFE, locate, warn_of_unread
from flowspec_edge.util.bounded_read import read_json_object
from flowspec_edge.util.tensors import check_finite
from flowspec_edge.util.weight_file import Embedding, EmbeddingTable

_Module = TypeVar("_Module", bound=nn.Module)
_Config = TypeVar("_Config")

_COMPUTED = "rotary_emb.inv_freq"  # stored by old releases of transformers; it follows from the config
_TRAINING_ONLY = ("verifier_",)  # speculators: copies of the target's norm and lm_head, to train with
# Of a training framework, of a compiled module, of a whole model, and of SpecForge's trainer.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "draft_model.")
# Beginnings of names that converters give, and those that a head's authors gave: vllm-project/speculators for
# EAGLE-1, 2 and HASS, and vLLM's name of d2t.
_CONVERTED = {"fusion_fc.": "fc.", "transformer.": "layers.0.", "draft_id_to_target_id": "d2t"}


def read_config(directory: Path, title: str, blocks: bool = False) -> dict[str, Any]:
    """Read a draft model's config.json.

    UsageError if it is missing or invalid, FlowspecError if it is of a format that cannot be run.
    ``title``: the model's name with its article; ``blocks``: it may be a block drafter.
    """
    path = directory / "config.json"
    if not path.exists():
        problem = describe(directory) if directory.is_dir() else None
        raise UsageError(problem or f"no {_bare(title)} at {directory}: config.json is missing")
    raw = read_json_object(path)
    check_config(raw, path)
    name = recognise_format(raw)
    if name == "MTP":
        raise FlowspecError(f"{path}: an MTP layer is not read from a directory of its own, only from its "
                            "model's checkpoint: --draft mtp with a model that has one")
    kind = kind_of_format(name or "")
    if name is not None and kind is None:
        raise FlowspecError(f"{path}: draft heads in the format {name} cannot be run, those of EAGLE-1, 2 "
                            f"and 3, DFlash, DFlash2, DSpark and JetSpec can; {_instead(raw)}")
    if kind is not None and kind.is_block and not blocks:
        raise FlowspecError(f"{path}: a head in the format {name} is a draft model of the kind {kind.name}: "
                            f"it belongs in a directory {kind.directory}/")
    return raw


def refuse_other_kind(directory: Path, kind: DraftKind, recognised_kind: DraftKind | None) -> None:
    """Raise UsageError if the draft model in the directory of ``kind`` is of another kind, as its files tell."""
    tells = kind.recognise is not None or kind.formats or kind.files_of
    if tells and recognised_kind is not None and recognised_kind.name not in (kind.name, kind.files_of):
        raise UsageError(f"{directory} holds a draft model of the kind {recognised_kind.name} "
                         f"({recognised_kind.title}): name it {directory.parent / recognised_kind.directory}")


def _instead(raw: dict[str, Any]) -> str:
    """Return the heads of the model that a config.json names, or where to look."""
    inner = raw.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, dict) else None
    target = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    target = target or raw.get("target_model_name_or_path")
    match = find_known_model(target) if isinstance(target, str) else None
    if match is None:
        return "what there is for a model: flowspec models head MODEL"
    heads = ", ".join(head.repository for head in match[1].runnable) or "none"
    return f"published for {target}: {heads}"


EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def layer_config(fields: Mapping[str, Any], origin: Path | str, family: Family) -> DecoderConfig:
    """Decide the fields of a draft model's layers, which are those of ``family``.

    FlowspecError for fields that do not go together.
    """
    given_fields = {name: value for name, value in fields.items() if value is not None}
    try:
        return decoder_config({**given_fields, "model_type": family.name}, origin)
    except UsageError as error:
        raise FlowspecError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise FlowspecError(f"{origin}: {first_line(error)}") from error


@dataclass(frozen=True)
class HeadFiles:
    """The files of a draft model, whose headers are read once; FlowspecError for damaged ones."""

    directory: Path

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The weights; None if there are none."""
        return None if locate(self.directory) is None else Checkpoint(self.directory)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The tensors' shapes by :func:`plain_name`; empty if there are no weights."""
        infos = self.checkpoint.stored(self.checkpoint.names) if self.checkpoint else {}
        return {plain_name(name): info.shape for name, info in infos.items()}

    @property
    def has_embedding(self) -> bool:
        return self._embedding is not None

    def own_embedding(self, config: Any, dtype: torch.dtype) -> EmbeddingTable | None:
        """Return the head's own embeddings, whose rows stay in the file.

        None if it has none, or if the file is not safetensors. FlowspecError if their shape is not ``config``'s.
        """
        if self.checkpoint is None or self._embedding is None:
            return None
        return self.checkpoint.table(self._embedding, torch.Size((config.vocab_size, config.hidden_size)), dtype)

    @property
    def _embedding(self) -> str | None:
        names = self.checkpoint.names if self.checkpoint else []
        return next((name for name in names if plain_name(name) == EMBEDDING), None)

    def read(self, title: str, embedding: bool = True) -> dict[str, StoredTensor]:
        """All tensors by their names in the files, without EMBEDDING unless ``embedding``.

        UsageError if there are no weights.
        """
        if self.checkpoint is None:
            raise UsageError(f"no {_bare(title)} at {self.directory}: neither {SAFE} nor {PICKLED} is there")
        warn_of_unread(self.directory)
        return self.checkpoint.lazy(name for name in self.checkpoint.names
                                    if embedding or plain_name(name) != EMBEDDING)


def refuse_language_model(directory: Path, names: Collection[str], title: str) -> None:
    """Raise UsageError if the tensors' ``names`` are those of a whole model; ``title``: what was looked for."""
    if "layers.0.input_layernorm.weight" in names and "fc.weight" not in names:
        raise UsageError(f"{directory} is a language model, not {title}: to draft with it, put it into "
                         "draft-lm/, or give it to flowspec models shard --draft")


def read_weights(directory: Path, title: str) -> dict[str, StoredTensor]:
    """Read a head's weights, as ``HeadFiles.read``."""
    return HeadFiles(directory).read(title)


def plain_names(weights: dict[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    """Rename by :func:`plain_name`, and drop what follows from the rest; FlowspecError if two names collide."""
    plain: dict[str, StoredTensor] = {}
    for stored, tensor in weights.items():
        name = plain_name(stored)
        if name.endswith(_COMPUTED) or name.startswith(_TRAINING_ONLY):
            continue
        if name in plain:
            raise FlowspecError(f"{directory}: tensor {name} is stored twice, also as {stored}")
        plain[name] = tensor
    return plain


def plain_name(name: str) -> str:
    """Return a head's tensor as its authors name it: without wrappers, and without the names of a converter."""
    while prefix := next((wrapper for wrapper in _WRAPPERS if name.startswith(wrapper)), ""):
        name = name.removeprefix(prefix)
    for theirs, ours in _CONVERTED.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return name


def on_meta(kind: Callable[[_Config], _Module], config: _Config) -> _Module:
    """Make a module on the meta device, without memory."""
    with torch.device("meta"):
        return kind(config)


def build(kind: Callable[[_Config], _Module], config: _Config, weights: dict[str, StoredTensor],
          directory: Path, title: str, dtype: torch.dtype, embedding: Embedding | None = None,
          quantise: Callable[[nn.Module], None] = lambda module: None) -> _Module:
    """Return a module of ``weights``, as :func:`_assign` checks them; ``embedding`` stands for its own.

    A linear has a bias if ``weights`` hold one, whatever ``config`` says.

    ``quantise``, called after each tensor with the parent of its linear, may replace complete linears in it.
    """
    module = on_meta(kind, config)
    fit_biases(module, weights)
    if embedding is not None:
        module.embed_tokens = nn.Identity()  # without weights
    _assign(module, weights, directory, title, dtype, quantise)
    if embedding is not None:
        module.embed_tokens = embedding.to(dtype)  # not copied
    return module.eval()


def fit_biases(module: nn.Module, stored: Collection[str]) -> None:
    """Give each linear of a module on the meta device a bias exactly if ``stored`` names one."""
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            bias = nn.Parameter(torch.empty(linear.out_features, device="meta"))
            linear.register_parameter("bias", bias if f"{name}.bias" in stored else None)


def _assign(module: nn.Module, weights: dict[str, StoredTensor], directory: Path, title: str,
            dtype: torch.dtype, quantise: Callable[[nn.Module], None]) -> None:
    """Replace all parameters by ``weights`` in ``dtype``; integer and bool tensors keep theirs.

    FlowspecError that names a missing, unexpected or misshapen tensor, or one of another kind.
    """
    state = module.state_dict()
    expected_shapes = {name: tuple(w.shape) for name, w in state.items()}
    for name in expected_shapes:
        if name not in weights:
            raise FlowspecError(f"{directory}: tensor {name} is missing from the {_bare(title)}")
    for name, weight in weights.items():
        if name not in expected_shapes:
            raise FlowspecError(f"{directory}: tensor {name} does not belong in {title}")
        if tuple(weight.shape) != expected_shapes[name]:
            raise FlowspecError(
                f"{directory}: tensor {name} has shape {list(weight.shape)}, "
                f"config.json asks for {list(expected_shapes[name])}"
            )
    # The largest first: what is quantised before the last ones is smaller than they are.
    for name in sorted(weights, key=lambda name: -prod(expected_shapes[name])):
        tensor = weights[name].read()
        if tensor.is_floating_point() != state[name].is_floating_point():
            raise FlowspecError(f"{directory}: tensor {name} holds {tensor.dtype}, not {state[name].dtype}")
        check_finite(tensor, dtype, f"{directory}: tensor {name}")
        placed = tensor.to(dtype if tensor.is_floating_point() else state[name].dtype)
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


def _bare(title: str) -> str:
    return title.split(" ", 1)[1]
