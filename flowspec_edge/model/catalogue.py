"""Known models (models/catalogue.toml): their repositories on Hugging Face's hub, draft heads and shapes."""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import RootModel

from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.tomlfile import StrictModel, load_toml

FETCHED = "fetched.json"  # written last: the download is complete


class KnownModel(StrictModel):
    """target         the checkpoint's repository, OWNER/NAME
    eagle2, eagle3  repositories of published heads: EAGLE-1/2's format, EAGLE-3's
    small          a small model with the target's tokenizer: a draft model of the kind "lm"
    chat_template  a built-in one, for targets whose tokenizer has none
    config         the fields of the target's config.json that fix its shape
    """

    target: str
    eagle2: str | None = None
    eagle3: str | None = None
    small: str | None = None
    chat_template: str | None = None
    config: dict[str, Any]

    @property
    def heads(self) -> dict[str, str]:
        """Repositories of the published heads by kind, the preferred one first."""
        return {kind: name for kind in ("eagle2", "eagle3") if (name := getattr(self, kind))}


class Catalogue(RootModel[dict[str, KnownModel]]):
    """The whole file, by name."""


@cache
def known_models() -> dict[str, KnownModel]:
    return load_toml(resource_dir("models") / "catalogue.toml", Catalogue).root


def find_known(name: str) -> tuple[str, KnownModel] | None:
    """A model's entry by its name here or on the hub, in any case; (name here, entry) or None."""
    wanted = name.lower()
    return next(((own, model) for own, model in known_models().items()
                 if wanted in (own, model.target.lower())), None)


def similar_names(name: str) -> list[str]:
    return get_close_matches(name.lower(), known_models(), n=2)


def fetched_dir(name: str) -> Path:
    """Where ``flowspec models fetch`` puts a model: $FLOWSPEC_MODELS, else the user's data directory."""
    given = os.environ.get("FLOWSPEC_MODELS")
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return (Path(given) if given else data / "flowspec" / "models") / name
