"""The machine and the package versions of a measurement, without host name, user or paths."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

from flowspec_edge.fleet.probe.board import processor

_PACKAGES = ("flowspec-edge", "torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}


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
