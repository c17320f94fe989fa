"""Downloads from Hugging Face's hub, into its client's cache or a directory of our own; both resume."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from flowspec_edge.errors import UsageError

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
    """Download what :func:`download` does to ``directory``. UsageError for an unknown or private repository,
    or an unreachable hub."""
    client = _client()
    try:
        client.snapshot_download(name, local_dir=directory, ignore_patterns=["*/*"],
                                 allow_patterns=_patterns(client, name))
    except Exception as error:
        raise _unavailable(name, error) from error


def download_config(name: str) -> Path:
    """Download config.json alone to the client's cache; the directory that holds it. Errors as for
    :func:`download`."""
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
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    licence = ", accept its licence on its page and log in with: hf auth login" if "gated" in reason else ""
    return UsageError(f"no directory {name}, and the hub does not provide it ({reason}): check the name and "
                      f"the network{licence}, or download it elsewhere and give its directory")
