"""What a board says of itself: its name, release, power mode, clocks, heat and memory.

Knows where Linux and L4T (NVIDIA's Linux for Tegra) write these things down, and reads them as they
come: formats drift between releases, so whatever is missing or strange is left out, and nothing here
ever fails.  Leaves out what says whose machine it is.  Does not measure.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from flowspec_edge import procfs
from flowspec_edge.runtime.vitals import hottest

_CPU_KEYS = ("model name", "Model", "Hardware")  # x86; ARM kernels, newer and older
_ROOT = Path("/")
_PATIENCE_S = 5.0
_RELEASE = re.compile(r"R(\d+)\b.*?REVISION:\s*([\d.]+)", re.IGNORECASE | re.DOTALL)
_POWER_MODE = re.compile(r"NV Power Mode:\s*(\S+)", re.IGNORECASE)
_MODE_NAMES = re.compile(r"<\s*POWER_MODEL\b[^>]*\bID=(\d+)[^>]*\bNAME=([^\s>]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Board:
    """What could be found out; an empty text or None where nothing could.

    machine        the board's model, else the processor's
    l4t            release of Linux for Tegra, such as "36.4.3"
    power_mode     by name, such as "MAXN_SUPER": ids mean other modes on other boards
    temperature_c  of the hottest thermal zone
    clocks_mhz     by name: "cpu" is the fastest core's at the moment, others are devfreq devices
    total_mb       memory that the system sees, 10^6 bytes
    available_mb   memory that a new process could take without swapping, 10^6 bytes
    """

    machine: str = ""
    l4t: str = ""
    power_mode: str = ""
    temperature_c: float | None = None
    clocks_mhz: dict[str, float] = field(default_factory=dict)
    total_mb: float | None = None
    available_mb: float | None = None

    @property
    def title(self) -> str:
        """Machine and release in one line."""
        return ", ".join(filter(None, (self.machine, self.l4t and f"L4T {self.l4t}")))


def read_board(root: Path = _ROOT) -> Board:
    """The board whose file system is at ``root``; only for "/" its tools are asked, too."""
    memory = procfs.sizes(root / "proc/meminfo")
    return Board(
        machine=_machine(root), l4t=l4t_release(procfs.text(root / "etc/nv_tegra_release")),
        power_mode=_power_mode(root), temperature_c=hottest(root), clocks_mhz=_clocks(root),
        total_mb=_megabytes(memory.get("MemTotal")), available_mb=_megabytes(memory.get("MemAvailable")),
    )


def resident_mb(pid: int, root: Path = _ROOT) -> float | None:
    """Memory that a process holds, 10^6 bytes; None if it has gone, or the system does not say."""
    return _megabytes(procfs.sizes(root / f"proc/{pid}/status").get("VmRSS"))


def power_modes(root: Path = _ROOT) -> list[str]:
    """The names of the board's power modes, in the order of L4T's file."""
    return [name for _, name in _modes(root)]


def _machine(root: Path) -> str:
    named = procfs.text(root / "proc/device-tree/model")
    if named:
        return named
    facts: dict[str, str] = {}
    for line in procfs.text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = next((facts[key] for key in _CPU_KEYS if facts.get(key)), "")
    cores = len(re.findall(r"^processor\s*:", procfs.text(root / "proc/cpuinfo"), re.MULTILINE))
    return f"{name}, {cores} core{'s' if cores > 1 else ''}" if name and cores else name


def l4t_release(text: str) -> str:
    """The release of Linux for Tegra, by /etc/nv_tegra_release's text; "" if it says none."""
    found = _RELEASE.search(text)
    return f"{found[1]}.{found[2]}" if found else ""


def _power_mode(root: Path) -> str:
    """From the tool; without it, by the id that it stored and the name in its configuration."""
    if root == _ROOT and (found := _POWER_MODE.search(_output("nvpmodel", "-q"))):
        return found[1]
    names = {int(number): name for number, name in _modes(root)}
    stored = re.search(r"pmode:\s*(\d+)", procfs.text(root / "var/lib/nvpmodel/status"))
    return names.get(int(stored[1]), "") if stored else ""


def _modes(root: Path) -> list[tuple[str, str]]:
    """(id, name) of every power mode."""
    return _MODE_NAMES.findall(procfs.text(root / "etc/nvpmodel.conf"))


def _clocks(root: Path) -> dict[str, float]:
    cores = [procfs.number(core / "cpufreq/scaling_cur_freq")  # kHz
             for core in procfs.entries(root / "sys/devices/system/cpu", "cpu[0-9]*")]
    clocks = {"cpu": max(running) / 1e3} if (running := [c for c in cores if c is not None]) else {}
    for device in procfs.entries(root / "sys/class/devfreq", "*"):
        hertz = procfs.number(device / "cur_freq")
        if hertz is not None:
            clocks[_devfreq_name(device.name)] = hertz / 1e6
    return {name: round(mhz, 1) for name, mhz in clocks.items()}


def _devfreq_name(name: str) -> str:
    """17000000.gpu -> gpu; whatever has another form keeps its name."""
    return re.sub(r"^[0-9a-f]+\.", "", name) or name


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout
