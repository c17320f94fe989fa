"""What a figure was measured on and with: the machine and the versions, and nobody's name.

Leaves out what says whose machine it is: host name, user, paths.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("flowspec-edge", "torch", "transformers", "numpy")
_CPU_KEYS = ("model name", "Model", "Hardware")  # x86; ARM kernels, newer and older


def versions() -> dict[str, str]:
    """Of the packages that the figures depend on."""
    return {name: version(name) for name in _PACKAGES}


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores, memory in bytes, operating system, Python; the GPU if torch's ``device`` is one."""
    return {
        "cpu": _cpu(), "cores": os.cpu_count(), "memory_bytes": _memory(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(), **({} if device == "cpu" else {"gpu": _gpu(device)}),
    }


def _gpu(device: str) -> str:
    import torch  # which help and errors do not wait for

    return torch.cuda.get_device_name(device)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return next((facts[key] for key in _CPU_KEYS if facts.get(key)), platform.processor() or "unknown")


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # not every system says
        return None
