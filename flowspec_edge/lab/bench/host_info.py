"""The machine and the package versions of a measurement, without host name, user or paths."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowspec_edge.boards.probe.board import processor

_PACKAGES = ("flowspec-edge", "torch", "transformers", "numpy")
_SOURCE = Path(__file__).resolve().parents[2]
_GIT_SECONDS = 10


def versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}


@cache
def commit() -> str | None:
    """Return the clone's commit, and whether files differ from it; None outside a clone."""
    if not (_SOURCE / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(_SOURCE), *command], capture_output=True, text=True, check=True,
                           timeout=_GIT_SECONDS).stdout.strip()
            for command in (("rev-parse", "--short=12", "HEAD"),
                            ("status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.SubprocessError):  # no git here, or not its user's clone
        return None
    return f"{head}{' with changes' if changes else ''}"


def host_info(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores, memory in bytes, operating system, Python; the GPU if ``device`` is one."""
    return {
        "cpu": processor() or platform.processor() or "unknown", "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(), **({} if device == "cpu" else {"gpu": _gpu(device)}),
    }


def _gpu(device: str) -> str:
    import torch  # slow to import; help and errors need no torch

    return torch.cuda.get_device_name(device)


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # unsupported by some systems
        return None
