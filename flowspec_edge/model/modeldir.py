"""A model on disk: its parts, and the facts in its config.json files, without torch or transformers.

Layouts: flowspec's own (``DIR/target`` and draft parts such as ``DIR/eagle2``), a plain Hugging Face
checkpoint, and a sharded model (``DIR/manifest.json``, ``DIR/stage-1`` …, and ``DIR/draft`` for D0, which has
flowspec's own layout).

Also here: the values of config.json that decide the family and shapes, checked before a library computes with
them, and the sampling settings of generation_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import STORED, DraftKind, draft_kind_named
from flowspec_edge.model.families import FAMILIES, Family, family_of, text_config, with_defaults
from flowspec_edge.model.recognise import GGUF, refuse_part, refuse_unless_runnable
from flowspec_edge.model.weights.located import MANIFEST, WEIGHTS, locate, stored_names, warn_of_unread
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.util.bounded_read import read_json_object
from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.terminal import did_you_mean

DEMO = "demo"
_TOKENIZER = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class ModelDir:
    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def sharded(self) -> bool:
        return is_sharded(self.path)

    @property
    def target(self) -> Path:
        """The directory of the target's config and tokenizer, and of its weights: if sharded, only D0's."""
        own = self.parts / "target"
        return own if own.is_dir() or self.sharded else self.path

    @property
    def stages(self) -> Path:
        """The directory from which stages load: the target, or the sharded model."""
        return self.path if self.sharded else self.target

    @property
    def parts(self) -> Path:
        """The directory of D0's parts, including the draft models."""
        return self.path / "draft" if self.sharded else self.path

    def draft(self, kind: str) -> Path | None:
        """The directory of its draft model of ``kind``, or of the target whose checkpoint holds it; None if
        it has none."""
        found = draft_kind_named(kind)
        path = self.parts / found.directory
        if found.in_target and not path.is_dir() and found in self._own_layers:
            return self.target
        return path if (path / "config.json").is_file() else None

    @property
    def drafts(self) -> list[DraftKind]:
        """The kinds of its draft models."""
        return [kind for kind in STORED if self.draft(kind.name) is not None]

    @cached_property
    def _own_layers(self) -> frozenset[DraftKind]:
        """The kinds whose layer the target's checkpoint names tensors of, and its family has."""
        if not (self.target / "config.json").is_file() or not (kinds := self.family.draft_layers):
            return frozenset()
        names = stored_names(self.target)
        return frozenset(kind for kind in kinds if any(name.startswith(kind.in_target) for name in names))

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.target / "config.json"
        config = with_defaults(text_config(read_json_object(path)))
        check_config(config, path)
        return config

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def sparse(self) -> bool:
        """Whether its layers have experts."""
        return self.family.sparse

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_width(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def max_positions(self) -> int:
        return position_limit(self.config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Empty if the file is missing."""
        path = self.target / "generation_config.json"
        if not path.is_file():
            return {}
        config = read_json_object(path)
        check_stop_ids(config, path)
        return config

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """End-of-sequence ids: generation_config.json's, else config.json's."""
        ids = self.generation_config.get("eos_token_id")
        ids = self.config.get("eos_token_id", []) if ids is None else ids
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def is_sharded(model_dir: Path | str) -> bool:
    return (Path(model_dir) / MANIFEST).is_file()


def missing_own_layer(kind: DraftKind, model: ModelDir | None, family: str = "") -> str:
    """Why ``model``, or one of a ``family`` that is not here, has no layer of its own that drafts."""
    layer = kind.title.removeprefix("own ")
    if model is None or kind not in model.family.draft_layers:
        family = model.config.get("model_type", "") if model else family
        having = [name for name, other in FAMILIES.items() if kind in other.draft_layers]
        return (f"draft {kind.name}: {family!r} models have no {layer} that can be run, only those of the "
                f"types {', '.join(having)}")
    return (f"draft {kind.name}: {model.path} has no {layer}, since its weights hold no tensors "
            f"{kind.in_target}*: take the checkpoint as it was published, and shard that again")


def resolve_model(name_or_path: str | Path | None = None, quantised: bool = False) -> ModelDir:
    """A model by directory, or by name: a shipped one, or a fetched one of the catalogue.

    UsageError if it or a file of its target is missing, or if stages cannot run it; ``quantised`` accepts AWQ
    and GPTQ.  Warns of files beside its weights that are not read.
    """
    name = str(name_or_path or DEMO)
    path = model_path(name)
    if path is None:
        raise UsageError(f"no model {name!r}: {_absence(name)}")
    model = ModelDir(path)
    refuse_part(path)
    refuse_two_targets(model)
    refuse_unless_runnable(model.target, quantised)
    for names in (WEIGHTS, _TOKENIZER):
        if not any((model.target / file).is_file() for file in names):
            raise UsageError(f"{model.target} is incomplete: {' or '.join(names)} is missing")
    locate(model.target)
    warn_of_unread(model.target)
    check_config(model.config, model.target / "config.json", required=("num_hidden_layers", "hidden_size"))
    return model


def refuse_two_targets(model: ModelDir) -> None:
    """UsageError if a directory is a checkpoint and has one in it, or is a sharded model and a checkpoint."""
    own, inner = model.path / "config.json", model.path / "target" / "config.json"
    if own.is_file() and model.sharded:
        raise UsageError(f"{model.path} is a sharded model by {MANIFEST} and a checkpoint by {own.name}: "
                         "move one of the two to another directory")
    if own.is_file() and inner.is_file():
        raise UsageError(f"{own} and {inner} are two models: give the directory of one, without the other in "
                         "it")


def model_path(name_or_path: str) -> Path | None:
    """The directory of a shipped or a fetched model, or the one of this name; None if there is none."""
    if name_or_path in shipped_models():
        return resource_dir("models") / name_or_path
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    from flowspec_edge.model.catalogue import FETCHED, fetched_dir, find_known  # pydantic takes a while

    known = find_known(name_or_path)
    return fetched_dir(known[0]) if known and (fetched_dir(known[0]) / FETCHED).is_file() else None


def require_name(name_or_path: str) -> None:
    """UsageError for what is no directory, no config.json, no name of the catalogue and no repository's name:
    without torch, which what opens a model imports."""
    from flowspec_edge.model.catalogue import find_known, is_repository_name

    path = Path(name_or_path)
    is_config = path.name == "config.json" and path.is_file()
    is_name = find_known(name_or_path) or is_repository_name(name_or_path)
    if not (is_config or is_name or is_here(name_or_path)):
        resolve_model(name_or_path)


def is_here(name_or_path: str) -> bool:
    return model_path(name_or_path) is not None


def _absence(name: str) -> str:
    from flowspec_edge.model.catalogue import find_known, known_models

    if known := find_known(name):
        return ("it is in the catalogue, but not on this machine: download it with: flowspec models fetch "
                f"{known[0]}")
    if Path(name).is_file() and not name.endswith(".gguf"):
        return "it is a file: give the directory of the checkpoint, with config.json and the tokenizer"
    if name.endswith(".gguf"):
        return GGUF
    meant = did_you_mean(name, [*shipped_models(), *known_models()]).rstrip()
    return "not a directory, and no name in: flowspec models list" + (f"; {meant}" if meant else "")


def shipped_models() -> list[str]:
    return sorted(path.parent.parent.name for path in resource_dir("models").glob("*/target/config.json"))


def cache_values(config: Mapping[str, Any]) -> int:
    """Elements of one row's keys and values in all layers; ``config``: of a config.json."""
    heads = int(config.get("num_attention_heads") or 0)
    keys = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or (int(config.get("hidden_size") or 0) // max(1, heads)))
    return 2 * keys * width * (int(config.get("num_hidden_layers") or 1) - recurrent_layers(config))


def recurrent_layers(config: Mapping[str, Any]) -> int:
    """Layers without keys and values."""
    if not family_of(config).recurrent:
        return 0
    layers, every = int(config["num_hidden_layers"]), int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    return sum(kind == "linear_attention" for kind in kinds)


def position_limit(config: Mapping[str, Any]) -> int:
    """The maximum number of tokens, prompt and answer together, that stages can run, whatever the rope
    scaling."""
    return int(config["max_position_embeddings"])


_SIZES = {  # field -> the most of any model, with room
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "num_hidden_layers": 1_000,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "linear_key_head_dim": 1 << 16,
    "linear_value_head_dim": 1 << 16,
    "linear_conv_kernel_dim": 1 << 10,
    "full_attention_interval": 1_000,
    "shared_expert_intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 26,
    "draft_vocab_size": 1 << 26,
    "target_hidden_size": 1 << 20,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}
_MAY_BE_NULL = {"num_key_value_heads", "head_dim", "sliding_window", "draft_vocab_size", "target_hidden_size"}
_POSITIVE = ("rms_norm_eps", "rope_theta")


def check_config(config: Mapping[str, Any], path: Path, required: Collection[str] = ()) -> None:
    """UsageError that names the first field of ``path`` which is missing or has an impossible value."""
    for name in required:
        if name not in config:
            raise UsageError(f"{path} has no {name}")
    for name, most in _SIZES.items():
        value = config.get(name, 1)
        if value is None and name in _MAY_BE_NULL:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise UsageError(f"{path}: {name} must be a whole number from 1 to {most}, not {_shown(value)}")
    for name in _POSITIVE:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UsageError(f"{path}: {name} must be a number above 0, not {_shown(value)}")
    layers = config.get("max_window_layers", 0)
    if type(layers) is not int or layers < 0:
        raise UsageError(f"{path}: max_window_layers must be a whole number, not {_shown(layers)}")
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise UsageError(f"{path}: layer_types must be a list of names, not {_shown(kinds)}")
    check_stop_ids(config, path)


def check_stop_ids(config: Mapping[str, Any], path: Path) -> None:
    ids = config.get("eos_token_id")
    for one in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if type(one) is not int:
            raise UsageError(f"{path}: eos_token_id must be a whole number or a list of them, "
                             f"not {_shown(one)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


_FILE = "generation_config.json"
Origin = Literal["command line", "generation_config.json", "default"]

# Setting -> its neutral values.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "no_repeat_ngram_size": (0, None),
    "min_new_tokens": (0, None),
    "min_length": (0, None),
    "num_beams": (1, None),
    "penalty_alpha": (0, None),
    "guidance_scale": (1, None),
    "bad_words_ids": ([], None),
    "suppress_tokens": ([], None),
    "begin_suppress_tokens": ([], None),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": ({}, [], None),
    "exponential_decay_length_penalty": (None,),
    "stop_strings": ([], None),
}
# The same for settings without effect on greedy decoding.
_NOT_APPLIED_DRAWING: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, None),
    "epsilon_cutoff": (0, None),
    "eta_cutoff": (0, None),
    "top_h": (None,),
}


def choose_sampling(requested: Sampling, set_by_user: Collection[str], model: ModelDir
                    ) -> tuple[Sampling, dict[str, Origin]]:
    """``requested``, completed by generation_config.json, and the origin of each value.

    ``set_by_user`` names the user's options, which take precedence.  Only with ``do_sample`` does the file
    recommend temperature (1 if absent), top_k, top_p and min_p; transformers' defaults are no recommendation.
    """
    origins: dict[str, Origin] = {
        name: "command line" if name in set_by_user else "default" for name in asdict(requested)}
    if model.generation_config.get("do_sample"):
        taken = {name: value for name, value in _recommended(model).items() if name not in set_by_user}
        try:
            requested = replace(requested, **taken)
        except UsageError as error:
            raise UsageError(f"{model.target / _FILE}: {error}") from error
        origins |= dict.fromkeys(taken, "generation_config.json")
    return requested, origins


def _recommended(model: ModelDir) -> dict[str, Any]:
    advice: dict[str, Any] = {"temperature": 1.0}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = model.generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{model.target / _FILE}: {name} must be a number, not {value!r}")
        advice[name] = max(0, int(value)) if name == "top_k" else float(value)  # -1 means off too
    return advice


def not_applied(model: ModelDir, sampling: Sampling) -> list[str]:
    """Settings in generation_config.json that are ignored but would change the text, as "name value"."""
    config = model.generation_config
    settings = _NOT_APPLIED if sampling.greedy else _NOT_APPLIED | _NOT_APPLIED_DRAWING
    return [f"{name} {config[name]}" for name, neutral in settings.items()
            if name in config and config[name] not in neutral]
