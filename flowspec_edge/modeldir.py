"""A model on disk: which parts a directory holds, and the few facts its config.json files state.

Knows the three layouts: flowspec's own (``DIR/target`` and the draft parts ``DIR/eagle2``,
``DIR/eagle2-deep``, ``DIR/eagle3``, ``DIR/draft-lm``, ``DIR/spd``), a plain Hugging Face checkpoint (the
target's files in DIR itself), and a sharded model (``DIR/manifest.json``, ``DIR/stage-1`` …, and in
``DIR/draft`` what D0 needs, laid out like flowspec's own).  Loads no weights and imports neither torch
nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flowspec_edge.errors import UsageError
from flowspec_edge.positions import position_limit
from flowspec_edge.resources import resource_dir

DEMO = "demo"
MANIFEST = "manifest.json"
# Kind of draft model -> directory.  The kind "ngram" looks up in the text and has none; "eagle2-deep" is a
# second EAGLE-2 head, to be asked for by name, beside the one that strategies draft with.
DRAFT_PARTS = {"eagle2": "eagle2", "eagle2-deep": "eagle2-deep", "eagle3": "eagle3", "lm": "draft-lm",
               "spd": "spd"}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class ModelDir:
    """A directory whose target is known to be there; the draft parts are optional."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def sharded(self) -> bool:
        """Whether the target is cut into shards, one directory a stage."""
        return (self.path / MANIFEST).is_file()

    @property
    def target(self) -> Path:
        """The target's config and tokenizer; all its weights, or, sharded, those that D0 holds."""
        own = self.parts / "target"
        return own if own.is_dir() or self.sharded else self.path

    @property
    def stages(self) -> Path:
        """Where a stage finds its weights: the target, or the sharded model."""
        return self.path if self.sharded else self.target

    @property
    def parts(self) -> Path:
        """Where D0's parts lie, the draft models among them."""
        return self.path / "draft" if self.sharded else self.path

    @property
    def eagle2(self) -> Path | None:
        return self.draft("eagle2")

    @property
    def draft_lm(self) -> Path | None:
        return self.draft("lm")

    @property
    def spd(self) -> Path | None:
        return self.draft("spd")

    def draft(self, kind: str) -> Path | None:
        """Where the draft model of this kind lies (the keys of ``DRAFT_PARTS``); None without one."""
        path = self.parts / DRAFT_PARTS[kind]
        return path if (path / "config.json").is_file() else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The target's config.json."""
        return _read_json(self.target / "config.json")

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_width(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def max_positions(self) -> int:
        """Tokens of prompt and answer together that the target was made for and stages can run."""
        return position_limit(self.config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The target's generation_config.json; empty without one."""
        path = self.target / "generation_config.json"
        return _read_json(path) if path.is_file() else {}

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a text: generation_config.json's, else config.json's."""
        ids = self.generation_config.get("eos_token_id")
        if ids is None:
            ids = self.config.get("eos_token_id")
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def resolve_model(name_or_path: str | Path | None = None) -> ModelDir:
    """A model by name (one that comes with the package) or by directory; the demo by default.

    Raises :class:`UsageError` when there is no such directory or a file of its target is missing.
    """
    name = str(name_or_path or DEMO)
    path = resource_dir("models") / name if name in shipped_models() else Path(name)
    if not path.is_dir():
        known = ", ".join(shipped_models()) or "none"
        raise UsageError(f"no model {name!r}: not a directory, and with the package come only: {known}")
    model = ModelDir(path)
    needed = [("config.json",), WEIGHTS, _TOKENIZER]
    for names in needed:
        if not any((model.target / file).is_file() for file in names):
            raise UsageError(f"{model.target} is incomplete: {' or '.join(names)} is missing")
    for key in ("num_hidden_layers", "hidden_size", "max_position_embeddings"):
        if not isinstance(model.config.get(key), int):
            raise UsageError(f"{model.target / 'config.json'} has no {key}")
    return model


def shipped_models() -> list[str]:
    """The models that come with the package."""
    return sorted(path.parent.parent.name for path in resource_dir("models").glob("*/target/config.json"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return data
