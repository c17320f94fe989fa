"""How a board is: its memory, heat and load, and what this process holds; for heartbeats, and for D0.

Knows which of the kernel's files tell this.  What a machine does not tell is left out, never made up.
Does not know who reports it to whom, nor what a board is called (``fleet.board``).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path

from flowspec_edge import procfs

_FRESH_S = 1.0  # reading takes some tenths of a millisecond, on a board with many thermal zones more
_ROOT = Path("/")
_COLDEST_C, _HOTTEST_C = -40.0, 200.0  # beyond these a zone is switched off, not connected or broken


class Vitals:
    """The vitals of this process and its board, read at most once a second."""

    def __init__(self, root: Path = _ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        """``root``: where /proc and /sys are; ``clock``: seconds."""
        self._root = root
        self._clock = clock
        self._read_at = -math.inf
        self._newest: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """See :func:`read_vitals`; at most a second old."""
        now = self._clock()
        if now - self._read_at >= _FRESH_S:
            self._read_at, self._newest = now, read_vitals(self._root)
        return dict(self._newest)


def read_vitals(root: Path = _ROOT) -> dict[str, float]:
    """What the system at ``root`` tells of these:

    memory_total      bytes that the board's system sees
    memory_available  bytes that a new process could take without swapping
    resident          bytes that this process holds in memory
    temperature_c     of the hottest thermal zone, degrees Celsius
    load              processes that ran or waited for a core, the average of the last minute
    cpus              cores that are switched on
    """
    memory = procfs.sizes(root / "proc/meminfo")
    load = procfs.text(root / "proc/loadavg").partition(" ")[0]
    told = {
        "memory_total": memory.get("MemTotal"),
        "memory_available": memory.get("MemAvailable"),
        "resident": procfs.sizes(root / "proc/self/status").get("VmRSS"),
        "temperature_c": hottest(root),
        "load": float(load) if re.fullmatch(r"\d+\.\d+", load) else None,
        "cpus": _cores(procfs.text(root / "sys/devices/system/cpu/online")),
    }
    return {name: value for name, value in told.items() if value is not None}


def hottest(root: Path = _ROOT) -> float | None:
    """The hottest thermal zone in degrees Celsius, to a tenth.

    Zones that are switched off say nothing, an error, or something far below freezing.
    """
    zones = [procfs.number(zone / "temp")
             for zone in procfs.entries(root / "sys/class/thermal", "thermal_zone*")]
    degrees = [zone / 1e3 for zone in zones if zone is not None]
    return max((round(d, 1) for d in degrees if _COLDEST_C < d < _HOTTEST_C), default=None)


def _cores(listed: str) -> int | None:
    """How many a list such as "0-3,5" names."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", listed):
        return None
    ends = [[int(end) for end in part.split("-")] for part in listed.split(",")]
    return sum(part[-1] - part[0] + 1 for part in ends)
