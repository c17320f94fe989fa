"""An opened model: its parts, the facts in its config.json files, its manifest, and tensors by name.

Layouts: flowspec's own (``DIR/target`` and draft parts such as ``DIR/eagle2``), a plain Hugging Face
checkpoint, and a sharded model (``DIR/manifest.json``, ``DIR/stage-1`` …, and ``DIR/draft`` for D0, which has
flowspec's own layout; a board has its own part alone).  Of a GGUF file ``model.gguf`` makes a plain checkpoint.

A model is opened once and passed on.  Everything is read when it is first asked for: facts need neither torch nor
transformers, which are imported for tensors and for ``parsed_config``.

Also here: models by their names, and the sampling settings of generation_config.json.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowspec_edge.errors import UsageError
from flowspec_edge.model.config import check_config, check_stop_ids, load_config, position_limit, read_decoder_config
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import draft_kind_named, stored_kinds
from flowspec_edge.model.families import FAMILIES, Family, family_of, text_config, with_defaults
from flowspec_edge.model.gguf.files import SUFFIX, gguf_in
from flowspec_edge.model.recognise import refuse_part, refuse_unless_runnable
from flowspec_edge.model.weights.located import (
    GGUF_TABLE,
    MANIFEST,
    WEIGHTS,
    display_path,
    locate,
    stored_names,
    warn_of_unread,
    warn_once,
)
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.util.bounded_read import read_json_object
from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.terminal import did_you_mean

if TYPE_CHECKING:
    from flowspec_edge.model.manifest import Manifest  # pydantic takes a while
    from flowspec_edge.model.weights.checkpoint import Checkpoint  # and so does torch
    from flowspec_edge.model.weights.files import WeightFiles

DEMO = "demo"
ANSWERING = "smollm2-135m"  # of the catalogue: small enough for one machine, and it answers questions
_TOKENIZER = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class OpenModel:
    """A model that a user named.

    ``quantised``: AWQ and GPTQ checkpoints are accepted, which sharding converts.
    """

    path: Path
    quantised: bool = False

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def display_path(self) -> Path:
        """What messages call it: of a GGUF file that file, not the directory that was made of it."""
        return display_path(self.path)

    @property
    def sharded(self) -> bool:
        return (self.path / MANIFEST).is_file()

    @property
    def read_by_transformers(self) -> bool:
        """Whether transformers' ``from_pretrained`` reads the target's directory: neither shards nor a GGUF file."""
        return not self.sharded and not self.from_gguf

    @property
    def from_gguf(self) -> bool:
        return (self.target / GGUF_TABLE).is_file()

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None unless the model is sharded; FlowspecError if it is invalid or of another format."""
        return self._read_manifest() if self.sharded else None

    def require_manifest(self) -> Manifest:
        """Return :attr:`manifest`; UsageError unless the model is sharded."""
        return self.manifest or self._read_manifest()

    def _read_manifest(self) -> Manifest:
        from flowspec_edge.model.manifest import Manifest

        return Manifest.read(self.path)

    @property
    def target(self) -> Path:
        """The directory of the target's config, tokenizer and weights. A sharded model has only D0's weights there."""
        target = self.parts / "target"
        return target if target.is_dir() or self.sharded else self.path

    @property
    def parts(self) -> Path:
        """The directory of D0's parts, including the draft models."""
        return self.path / "draft" if self.sharded else self.path

    def draft(self, kind: str) -> Path | None:
        """Return the directory of its draft model of ``kind``, or of the target whose checkpoint holds it.

        None if it has none.
        """
        draft_kind = draft_kind_named(kind)
        path = self.parts / draft_kind.directory
        if draft_kind.in_target and not path.is_dir() and draft_kind in self._own_layers:
            return self.target
        return path if (path / "config.json").is_file() else None

    @property
    def drafts(self) -> list[DraftKind]:
        """The kinds of its draft models."""
        return [kind for kind in stored_kinds() if self.draft(kind.name) is not None]

    @cached_property
    def _own_layers(self) -> frozenset[DraftKind]:
        """The kinds whose layer the target's checkpoint names tensors of, and its family has."""
        if not (self.target / "config.json").is_file() or not (kinds := self.family.draft_layers):
            return frozenset()
        names = stored_names(self.target)
        return frozenset(kind for kind in kinds if any(name.startswith(kind.in_target) for name in names))

    @property
    def home(self) -> Path:
        """The directory of the target's config.json: of a board's stage, its part."""
        if self.sharded and not (self.target / "config.json").is_file():
            parts = (self.path / f"stage-{i + 1}" for i in range(self.require_manifest().stages))
            return next((part for part in parts if (part / "config.json").is_file()), self.target)
        return self.target

    @cached_property
    def decoder(self) -> DecoderConfig:
        """What the target's layers are; UsageError if stages cannot run the model."""
        return read_decoder_config(self.home, self.quantised)

    @cached_property
    def parsed_config(self) -> Any:
        """The target's configuration as transformers reads it; UsageError if stages cannot run the model."""
        return load_config(self.home, self.quantised)

    @contextmanager
    def part(self, name: str) -> Iterator[OpenPart]:
        """Open one part of a sharded model, compared with its manifest.

        Names, sizes and small files are compared before the block, the sha256 of weights after it.  Use nothing
        that the
        block has loaded before it has ended.

        Of a checkpoint every part is the whole target, which is compared with nothing.  FlowspecError that names a
        missing, altered or unexpected file.
        """
        from flowspec_edge.model.manifest import DRAFT
        from flowspec_edge.model.weights.files import WeightFiles

        if self.manifest is None:
            yield OpenPart(self.target, WeightFiles(), self.quantised)
            return
        files = WeightFiles(self.manifest.check_sizes(name))
        with files.compared():
            yield OpenPart(self.target if name == DRAFT else self.path / name, files)

    def checkpoint(self) -> Checkpoint:
        """Open the target's tensors, which can be looked up by name.

        Of a sharded model only D0's tensors are there: lm_head, and the embeddings if a draft model needs them.
        """
        from flowspec_edge.model.weights.checkpoint import Checkpoint

        return Checkpoint(self.target)

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.home / "config.json"
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
    def weight_values(self) -> int:
        """Return the number of values in the target's weights.

        For a checkpoint it follows from the sizes of its files.
        """
        if (table := self.target / GGUF_TABLE).is_file():
            return sum(prod(tensor["shape"]) for tensor in read_json_object(table)["tensors"].values())
        dtype_name = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        stored = 4 if dtype_name == "float32" else 1 if dtype_name.startswith("float8") else 2
        files = [file for end in ("safetensors", "bin") for file in self.target.glob(f"*.{end}")]
        return sum(file.stat().st_size for file in files) // stored

    @property
    def size(self) -> int:
        """The bytes of all files, including those of a GGUF file that lies elsewhere."""
        beside = read_json_object(table)["files"] if (table := self.target / GGUF_TABLE).is_file() else ()
        directory_bytes = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        return directory_bytes + sum(int(file["size"]) for file in beside)


@dataclass(frozen=True)
class OpenPart:
    """What one device loads of a target: its weights' ``directory`` and ``files``."""

    directory: Path
    files: WeightFiles
    quantised: bool = False

    @cached_property
    def checkpoint(self) -> Checkpoint:
        from flowspec_edge.model.weights.checkpoint import Checkpoint

        return Checkpoint(self.directory, self.files)

    @cached_property
    def decoder(self) -> DecoderConfig:
        """The configuration of the decoder's layers."""
        return read_decoder_config(self.directory, self.quantised)


def opened(model: OpenModel | Path | str) -> OpenModel:
    """Open a model, unless it is open already."""
    return model if isinstance(model, OpenModel) else OpenModel(Path(model))


def missing_own_layer(kind: DraftKind, model: OpenModel | None, family: str = "") -> str:
    """Why ``model``, or one of a ``family`` that is not here, has no layer of its own that drafts."""
    layer = kind.title.removeprefix("own ")
    if model is None or kind not in model.family.draft_layers:
        family = model.config.get("model_type", "") if model else family
        having = [name for name, other in FAMILIES.items() if kind in other.draft_layers]
        return (f"draft {kind.name}: {family!r} models have no {layer} that can be run, only those of the "
                f"types {', '.join(having)}")
    return (f"draft {kind.name}: {model.display_path} has no {layer}, since its weights hold no tensors "
            f"{kind.in_target}*: take the checkpoint as it was published, and shard that again")


def resolve_model(name_or_path: str | Path | None = None, quantised: bool = False) -> OpenModel:
    """Return a model by directory, or by name: a shipped one, or a fetched one of the catalogue.

    UsageError if it or a file of its target is missing, or if stages cannot run it; ``quantised`` accepts AWQ
    and GPTQ.  Warns of files beside its weights, and of directories beside its target, that are not read.
    """
    name = str(name_or_path or DEMO)
    path = model_path(name)
    if path is None:
        raise UsageError(f"no model {name!r}: {_absence(name)}")
    model = OpenModel(path, quantised)
    refuse_part(path)
    refuse_two_targets(model)
    refuse_unless_runnable(model.target, quantised)
    for names, advice in ((WEIGHTS, "copy the checkpoint's weights there"),
                          (_TOKENIZER, "copy it, with tokenizer_config.json, from the model that this one was tuned "
                                       "from")):
        if not any((model.target / file).is_file() for file in names):
            raise UsageError(f"{model.target} is incomplete: {' or '.join(names)} is missing: {advice}")
    locate(model.target)
    warn_of_unread(model.target)
    _warn_of_unread_parts(model)
    check_config(model.config, model.target / "config.json", required=("num_hidden_layers", "hidden_size"))
    return model


def _warn_of_unread_parts(model: OpenModel) -> None:
    if model.sharded or model.target == model.path:
        return
    names = [kind.directory for kind in stored_kinds()]
    for path in sorted(model.path.iterdir()):
        if path.name not in ("target", *names) and not path.name.startswith(".") and (path / "config.json").is_file():
            warn_once(f"{path} is not read: a draft model goes by its directory's name, which is one of "
                      f"{', '.join(names)}; or give it to flowspec models shard as --draft {path}")


def refuse_two_targets(model: OpenModel) -> None:
    """Raise UsageError if a directory is a checkpoint and has one in it, or is a sharded model and a checkpoint."""
    outer, inner = model.path / "config.json", model.path / "target" / "config.json"
    if outer.is_file() and model.sharded:
        raise UsageError(f"{model.path} contains both a sharded model ({MANIFEST}) and a checkpoint ({outer.name}): "
                         "move one of them to another directory")
    if outer.is_file() and inner.is_file():
        raise UsageError(f"{outer} and {inner} are two models: move one of them to another directory")


def model_path(name_or_path: str) -> Path | None:
    """Return the directory of a shipped or a fetched model, of a GGUF file, or the one of this name.

    None if there is none.

    Errors as for ``model.gguf.home``.
    """
    if name_or_path in shipped_models():
        return resource_dir("models") / name_or_path
    path, name = Path(name_or_path), None
    if not path.exists():
        from flowspec_edge.model.catalogue import fetched_dir, find_known_model, is_fetched  # pydantic takes a while

        entry = find_known_model(name_or_path)
        if entry is None or not is_fetched(entry[0]):
            return None
        name, path = entry[0], fetched_dir(entry[0])
    if (file := gguf_in(path)) is not None:
        from flowspec_edge.model.gguf.home import home_of  # numpy takes a while

        return home_of(file, name)
    return path if path.is_dir() else None


def require_name(name_or_path: str) -> None:
    """Raise UsageError for what names no model.

    A model is a directory, a config.json, a name of the catalogue or a repository's name.  The check needs no
    torch, which
    what opens a model imports.
    """
    from flowspec_edge.model.catalogue import find_known_model, is_repository_name

    path = Path(name_or_path)
    is_config = path.name == "config.json" and path.is_file()
    is_name = find_known_model(name_or_path) or is_repository_name(name_or_path)
    if not (is_config or is_name or is_here(name_or_path)):
        resolve_model(name_or_path)


def is_here(name_or_path: str) -> bool:
    return model_path(name_or_path) is not None


def answering_model() -> str:
    """Return the name of the model to talk to by default: the one that was made for it, if it is on this machine."""
    return ANSWERING if is_here(ANSWERING) else DEMO


def _absence(name: str) -> str:
    from flowspec_edge.model.catalogue import find_known_model, known_models

    if entry := find_known_model(name):
        return ("it is in the catalogue, but not on this machine: download it with: flowspec models fetch "
                f"{entry[0]}")
    if name.endswith(SUFFIX):
        return "there is no such GGUF file"
    if Path(name).is_file():
        return "it is a file: give the directory of the checkpoint, with config.json and the tokenizer, or a GGUF file"
    suggestion = did_you_mean(name, [*shipped_models(), *known_models()]).rstrip()
    return "not a directory, and no name in: flowspec models list" + (f"; {suggestion}" if suggestion else "")


def shipped_models() -> list[str]:
    return sorted(path.parent.parent.name for path in resource_dir("models").glob("*/target/config.json"))


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


def choose_sampling(requested: Sampling, set_by_user: Collection[str], model: OpenModel
                    ) -> tuple[Sampling, dict[str, Origin]]:
    """Complete ``requested`` by generation_config.json, and return the origin of each value.

    ``set_by_user`` names the user's options, which take precedence.  Only with ``do_sample`` does the file
    recommend temperature (1 if absent), top_k, top_p and min_p; transformers' defaults are no recommendation.
    """
    origins: dict[str, Origin] = {
        name: "command line" if name in set_by_user else "default" for name in asdict(requested)}
    if model.generation_config.get("do_sample"):
        recommended = {name: value for name, value in _recommended(model).items() if name not in set_by_user}
        try:
            requested = replace(requested, **recommended)
        except UsageError as error:
            raise UsageError(f"{model.target / _FILE}: {error}") from error
        origins |= dict.fromkeys(recommended, "generation_config.json")
    return requested, origins


def _recommended(model: OpenModel) -> dict[str, Any]:
    advice: dict[str, Any] = {"temperature": 1.0}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = model.generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{model.target / _FILE}: {name} must be a number, not {value!r}")
        advice[name] = max(0, int(value)) if name == "top_k" else float(value)  # -1 means off too
    return advice


def not_applied(model: OpenModel, sampling: Sampling) -> list[str]:
    """List settings of generation_config.json that are ignored but would change the text, as "name value"."""
    config = model.generation_config
    settings = _NOT_APPLIED if sampling.greedy else _NOT_APPLIED | _NOT_APPLIED_DRAWING
    return [f"{name} {config[name]}" for name, neutral in settings.items()
            if name in config and config[name] not in neutral]
