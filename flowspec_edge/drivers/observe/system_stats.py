"""Memory, temperature and load of a board and this process; figures that the kernel lacks are left out."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path

from flowspec_edge.drivers.observe.power import PowerMeter, board_number
from flowspec_edge.drivers.observe.power_rails import system_root
from flowspec_edge.util import procfs

_FRESH_S = 1.0  # reading takes some tenths of a millisecond, on a board with many thermal zones more
_ROOT = Path("/")
_COLDEST_C, _HOTTEST_C = -40.0, 200.0  # beyond these a zone is switched off, not connected or broken


class SystemStats:
    """Caches :func:`read_system_stats` for a second."""

    def __init__(self, root: Path = _ROOT, clock: Callable[[], float] = time.monotonic,
                 meter: PowerMeter | None = None) -> None:
        """Take ``root``, which contains proc/ and sys/, a clock in seconds, and the board's running meter."""
        self._meter = meter
        number = board_number(system_root())
        self._machine = {} if number is None else {"machine": number}
        self._root = root
        self._clock = clock
        self._read_at = -math.inf
        self._newest: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Includes ``PowerMeter.read``, and ``machine``, a number that processes of one machine share."""
        now = self._clock()
        if now - self._read_at >= _FRESH_S:
            self._read_at, self._newest = now, read_system_stats(self._root)
        return {**self._newest, **self._machine, **(self._meter.read() if self._meter else {})}


def read_system_stats(root: Path = _ROOT) -> dict[str, float]:
    """Read the board's figures from /proc and /sys; those that a machine lacks are left out.

    memory_total      bytes of the board's memory
    memory_available  bytes that a new process could take without swapping
    resident          bytes that this process holds in memory
    temperature_c     of the hottest thermal zone, degrees Celsius
    load              1-minute load average
    cpus              online cores
    """
    memory = procfs.sizes(root / "proc/meminfo")
    load = procfs.text(root / "proc/loadavg").partition(" ")[0]
    figures = {
        "memory_total": memory.get("MemTotal"),
        "memory_available": memory.get("MemAvailable"),
        "resident": procfs.sizes(root / "proc/self/status").get("VmRSS"),
        "temperature_c": hottest(root),
        "load": float(load) if re.fullmatch(r"\d+\.\d+", load) else None,
        "cpus": _cores(procfs.text(root / "sys/devices/system/cpu/online")),
    }
    return {name: value for name, value in figures.items() if value is not None}


def hottest(root: Path = _ROOT) -> float | None:
    """Hottest thermal zone in degrees Celsius; disabled zones read as empty, error, or far below freezing."""
    zones = [procfs.number(zone / "temp")
             for zone in procfs.entries(root / "sys/class/thermal", "thermal_zone*")]
    degrees = [zone / 1e3 for zone in zones if zone is not None]
    return max((round(d, 1) for d in degrees if _COLDEST_C < d < _HOTTEST_C), default=None)


def _cores(ranges: str) -> int | None:
    """Count the cores in a list such as "0-3,5"."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", ranges):
        return None
    ends = [[int(end) for end in part.split("-")] for part in ranges.split(",")]
    return sum(part[-1] - part[0] + 1 for part in ends)
