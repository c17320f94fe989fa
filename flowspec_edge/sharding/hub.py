"""Checkpoints from the Hugging Face hub, through its own client and into its own cache.

Knows which of a repository's files are needed.  Does not know what is done with them.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from flowspec_edge.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_BESIDE = ("*.json", "tokenizer.model", "merges.txt", "*.jinja")
_SAFE, _PICKLED = "*.safetensors", "pytorch_model*.bin"


def is_name(model: str) -> bool:
    """Whether ``model`` looks like the name of a repository, OWNER/NAME."""
    return _NAME.fullmatch(model) is not None


def download(name: str) -> tuple[Path, str]:
    """The repository's files, from the cache where they are there: (directory, commit).

    Files of weights in PyTorch's format only where there are no safetensors.  UsageError if it cannot be
    had: unknown, private, or no network and not in the cache.
    """
    import huggingface_hub as client  # slow to import, and only needed here

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what fails is said in one line below
    try:
        files = [file.rfilename for file in client.HfApi().model_info(name).siblings or ()]
        safe = any(file.endswith(".safetensors") and "/" not in file for file in files)
        directory = client.snapshot_download(
            name, allow_patterns=[*_BESIDE, _SAFE if safe else _PICKLED], ignore_patterns=["*/*"])
    except Exception as error:  # the client, its HTTP library and the cache raise many kinds for one fact
        try:
            directory = client.snapshot_download(name, local_files_only=True)
        except Exception:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UsageError(f"no directory {name}, and the hub does not give it ({reason}): check the name "
                             "and the network, or download it elsewhere and give its directory") from error
    return Path(directory), Path(directory).name
