"""A board as the kernel and L4T (NVIDIA's Linux for Tegra) describe it.

Formats drift between releases: missing or malformed entries are left out instead of raising.
Nothing that identifies the board's owner is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from flowspec_edge.boards.probe.facts import SystemFacts
from flowspec_edge.boards.probe.onboard.tools import output
from flowspec_edge.drivers.observe.system_stats import hottest
from flowspec_edge.util import procfs

_CPU_KEYS = ("model name", "Model", "Hardware")  # x86; ARM kernels, newer and older
_ROOT = Path("/")
_RELEASE = re.compile(r"R(\d+)\b.*?REVISION:\s*([\d.]+)", re.IGNORECASE | re.DOTALL)
_POWER_MODE = re.compile(r"NV Power Mode:\s*(\S+)", re.IGNORECASE)
_MODES = re.compile(r"<\s*POWER_MODEL\b[^>]*\bID=(\d+)[^>]*\bNAME=([^\s>]+)", re.IGNORECASE)


@dataclass(frozen=True)
class BoardInfo:
    """What a board says of itself: empty text or None where it does not say; memory in 10^6 bytes.

    machine        the board's model, else the processor's
    power_mode     by name, such as "MAXN_SUPER": ids mean other modes on other boards
    temperature_c  of the hottest thermal zone
    clocks_mhz     "cpu": the fastest core's current clock; others: devfreq devices
    cores          of the CPU
    available_mb   what a new process could take without swapping
    """

    machine: str = ""
    l4t: str = ""
    power_mode: str = ""
    temperature_c: float | None = None
    clocks_mhz: dict[str, float] = field(default_factory=dict)
    total_mb: float | None = None
    available_mb: float | None = None
    cores: int | None = None

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.machine, self.l4t and f"L4T {self.l4t}")))


def read_board(root: Path = _ROOT, nvpmodel: str | None = None) -> BoardInfo:
    """Read the board's facts below ``root``.

    nvpmodel  output of `nvpmodel -q`; None runs the tool if ``root`` is "/"
    """
    if nvpmodel is None:
        nvpmodel = output("nvpmodel", "-q") if root == _ROOT else ""
    memory = procfs.sizes(root / "proc/meminfo")
    return BoardInfo(
        machine=_machine(root), l4t=l4t_release(procfs.text(root / "etc/nv_tegra_release")),
        power_mode=_power_mode(root, nvpmodel), temperature_c=hottest(root), clocks_mhz=_clocks(root),
        total_mb=_megabytes(memory.get("MemTotal")), available_mb=_megabytes(memory.get("MemAvailable")),
        cores=_cores(root) or None,
    )


def board_of(facts: SystemFacts) -> BoardInfo:
    with TemporaryDirectory(prefix="flowspec-") as directory:
        for name, content in facts.files.items():
            if content:
                path = Path(directory, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
        return read_board(Path(directory), facts.nvpmodel)


def resident_mb(pid: int, root: Path = _ROOT) -> float | None:
    """Return a process's resident memory, 10^6 bytes; None if it has ended, or without /proc."""
    return _megabytes(procfs.sizes(root / f"proc/{pid}/status").get("VmRSS"))


def mode_numbers(text: str) -> dict[str, str]:
    """Map the power modes' names to nvpmodel's numbers, from the text of /etc/nvpmodel.conf and in its order."""
    return {name: number for number, name in _MODES.findall(text)}


def l4t_release(text: str) -> str:
    """Return the release of L4T in the text of /etc/nv_tegra_release, such as "36.4.3"; "" if it names none."""
    match = _RELEASE.search(text)
    return f"{match[1]}.{match[2]}" if match else ""


def l4t_of(facts: SystemFacts) -> str:
    """Return the board's release of L4T; "" if it is no Jetson."""
    return l4t_release(facts.files.get("etc/nv_tegra_release", ""))


def processor(root: Path = _ROOT) -> str:
    """Return the processor's name, or "" if the kernel does not tell it."""
    facts: dict[str, str] = {}
    for line in procfs.text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return next((facts[key] for key in _CPU_KEYS if facts.get(key)), "")


def _machine(root: Path) -> str:
    model = procfs.text(root / "sys/firmware/devicetree/base/model")
    if model:
        return model
    name = processor(root)
    cores = _cores(root)
    return f"{name}, {cores} core{'s' if cores > 1 else ''}" if name and cores else name


def _cores(root: Path) -> int:
    return len(re.findall(r"^processor\s*:", procfs.text(root / "proc/cpuinfo"), re.MULTILINE))


def _power_mode(root: Path, nvpmodel: str) -> str:
    if match := _POWER_MODE.search(nvpmodel):
        return match[1]
    modes = mode_numbers(procfs.text(root / "etc/nvpmodel.conf"))
    names = {int(number): name for name, number in modes.items()}
    stored = re.search(r"pmode:\s*(\d+)", procfs.text(root / "var/lib/nvpmodel/status"))
    return names.get(int(stored[1]), "") if stored else ""


def _clocks(root: Path) -> dict[str, float]:
    cores = [procfs.number(core / "cpufreq/scaling_cur_freq")  # kHz
             for core in procfs.entries(root / "sys/devices/system/cpu", "cpu[0-9]*")]
    clocks = {"cpu": max(running) / 1e3} if (running := [c for c in cores if c is not None]) else {}
    for device in procfs.entries(root / "sys/class/devfreq", "*"):
        hertz = procfs.number(device / "cur_freq")
        if hertz is not None:
            # 17000000.gpu → gpu
            clocks[re.sub(r"^[0-9a-f]+\.", "", device.name) or device.name] = hertz / 1e6
    return {name: round(mhz, 1) for name, mhz in clocks.items()}


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6
