"""A board's check-up: what it is asked, what was found, and what to do about it.

Knows what a finding is, and the checks that need no more than the kernel's and L4T's files: release,
memory, swap, disk, power mode, heat, time, groups.  Does not compute anything (``checkup_compute``), nor know
other boards.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowspec_edge import procfs
from flowspec_edge.fleet.board import Board, read_board

State = Literal["ok", "warning", "failed", "unknown"]

_ROOT = Path("/")
_PYTHON = (3, 10)
_GIGA = 1e9
_PATIENCE_S = 10.0
_LEAST_DISK_GB = 10.0  # a release with its environment takes about 3, a shard of a 13B model in 4 bits 3
_LEAST_FREE_SHARE = 0.6  # of a board's memory; a desktop takes about a tenth of an 8 GB board
_WARM_C, _HOT_C = 80.0, 95.0  # Orin modules slow down from about 95 °C on, of their own accord
_GROUPS = ("video", "render")  # who may use a Jetson's GPU

# L4T releases, the first that begins like a board's.  Source: NVIDIA's JetPack archive.
_JETPACKS = (("35.", "5"), ("36.3", "6.0"), ("36.4", "6.1 or 6.2"), ("36.5", "6.2"), ("38.", "7.0 or 7.1"),
             ("39.", "7.2"))
TOO_OLD = ("35.", "34.", "32.")  # Ubuntu 20.04 and before: Python 3.8


@dataclass(frozen=True)
class Finding:
    """What one check found.

    check   its name
    found   in words, with figures
    advice  the next step, if something is not as it should be
    remedy  the commands that are that step, as root, if they do no harm
    fixed   whether they have been run, and did it; None if nobody asked for that
    """

    check: str
    state: State
    found: str
    advice: str = ""
    remedy: tuple[tuple[str, ...], ...] = ()
    fixed: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """What others are told; ``fixed`` only if somebody asked for that."""
        told = {"check": self.check, "state": self.state, "found": self.found, "advice": self.advice}
        return told if self.fixed is None else {**told, "fixed": self.fixed}


def check_system(root: Path = _ROOT, storage: Path | None = None, power_mode: str = "") -> list[Finding]:
    """The checks of the system at ``root``; the disk's is that of ``storage``, by default the home
    directory.  What only a Jetson has is asked only of one, and power modes where one is to be set."""
    board = read_board(root)
    findings = [_release(board), _python(), _memory(board), _swap(root), _disk(storage or Path.home()),
                _heat(board)]
    if root == _ROOT:
        findings.append(check_time(_timedatectl()))
    if board.l4t or power_mode:
        findings.append(_power(board, root, power_mode))
    if board.l4t:
        findings.append(_membership(root))
    return findings


def jetpack_of(l4t: str) -> str:
    """The JetPack that a release of Linux for Tegra belongs to; empty for one that is not known."""
    return next((jetpack for start, jetpack in _JETPACKS if l4t.startswith(start)), "")


def check_time(told: str) -> Finding:
    """Whether the clock is kept right, by what ``timedatectl show`` says."""
    said = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    if "NTP" not in said:
        return Finding("time", "unknown", "timedatectl does not say")
    if said.get("CanNTP") == "no":
        return Finding("time", "warning", "there is nothing that keeps the clock right",
                       "sudo apt-get install systemd-timesyncd")
    if said["NTP"] != "yes":
        return Finding("time", "warning", "the clock is not kept right: NTP is off",
                       "sudo timedatectl set-ntp true", remedy=(("timedatectl", "set-ntp", "true"),))
    if said.get("NTPSynchronized") != "yes":
        return Finding("time", "warning", "NTP is on, and no server has answered yet",
                       "timedatectl timesync-status shows which one is asked")
    return Finding("time", "ok", "kept right by NTP")


def _release(board: Board) -> Finding:
    if not board.l4t:
        return Finding("board", "ok", f"{board.machine or 'a machine'}; no Jetson")
    name = f"{board.machine or 'a Jetson'}, L4T {board.l4t}"
    if board.l4t.startswith(TOO_OLD):
        return Finding("board", "failed", f"{name}: its Python is older than 3.10",
                       "flash JetPack 6 or 7; NVIDIA's SDK Manager does")
    jetpack = jetpack_of(board.l4t)
    if not jetpack:
        return Finding("board", "warning", f"{name}: a release that this version does not know",
                       "go on if the checks below pass, and tell us that they do")
    return Finding("board", "ok", f"{name} (JetPack {jetpack})")


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _PYTHON:
        return Finding("python", "failed", found, "make the environment with Python 3.10 or newer")
    return Finding("python", "ok", found)


def _memory(board: Board) -> Finding:
    if board.total_mb is None or board.available_mb is None:
        return Finding("memory", "unknown", "the system does not say")
    found = f"{board.available_mb / 1e3:.1f} of {board.total_mb / 1e3:.1f} GB available"
    if board.available_mb < _LEAST_FREE_SHARE * board.total_mb:
        advice = ("a board without a desktop has about 0.8 GB more: sudo systemctl set-default "
                  "multi-user.target, then reboot" if board.l4t else "end what else runs here")
        return Finding("memory", "warning", found, advice)
    return Finding("memory", "ok", found)


def _swap(root: Path) -> Finding:
    lines = procfs.text(root / "proc/swaps").splitlines()[1:]
    areas = [line.split() for line in lines if len(line.split()) >= 3]
    if not areas:
        return Finding("swap", "ok", "none")
    total = sum(int(area[2]) * 1024 for area in areas if area[2].isdigit()) / _GIGA
    found = f"{total:.1f} GB in {', '.join(area[0] for area in areas)}"
    if all("zram" in area[0] for area in areas):
        return Finding("swap", "warning", found,
                       "zram takes the memory that shards want: sudo systemctl disable nvzramconfig, and a "
                       "swap file on NVMe if one is needed")
    return Finding("swap", "ok", found)


def _disk(storage: Path) -> Finding:
    try:
        free = shutil.disk_usage(storage).free / _GIGA
    except OSError as error:
        return Finding("disk", "failed", f"{storage}: {error.strerror}", "name a directory that is there")
    found = f"{free:.0f} GB free at {storage}"
    if free < _LEAST_DISK_GB:
        return Finding("disk", "warning", found,
                       f"a release and a shard want {_LEAST_DISK_GB:.0f} GB: make room")
    return Finding("disk", "ok", found)


def _heat(board: Board) -> Finding:
    if board.temperature_c is None:
        return Finding("temperature", "unknown", "no sensor tells")
    found = f"{board.temperature_c:.0f} °C in the hottest zone"
    if board.temperature_c >= _HOT_C:
        return Finding("temperature", "failed", found, "it slows itself down: cool it, and see to its fan")
    if board.temperature_c >= _WARM_C:
        return Finding("temperature", "warning", found, "under load it will slow itself down: see to its fan")
    return Finding("temperature", "ok", found)


def _power(board: Board, root: Path, wanted: str) -> Finding:
    """Modes go by name: a number means different things on different boards."""
    numbers = {name: number for number, name in re.findall(
        r"<\s*POWER_MODEL\b[^>]*\bID=(\d+)[^>]*\bNAME=([^\s>]+)", procfs.text(root / "etc/nvpmodel.conf"),
        re.IGNORECASE)}
    if wanted and wanted not in numbers:
        return Finding("power mode", "failed", f"{wanted} is asked for, and there is "
                       + (f"only {', '.join(numbers)}" if numbers else "no /etc/nvpmodel.conf"),
                       "see power_mode in the cluster file")
    if not board.power_mode:
        return Finding("power mode", "unknown", "nvpmodel does not say", "sudo nvpmodel -q shows it")
    best = wanted or next((name for name in reversed(numbers) if name.upper().startswith("MAXN")), "")
    fastest = board.power_mode.upper().startswith("MAXN")
    if board.power_mode == wanted or not best or (fastest and not wanted):
        return Finding("power mode", "ok", board.power_mode)
    clocks = "! command -v jetson_clocks >/dev/null || jetson_clocks"
    return Finding("power mode", "warning",
                   f"{board.power_mode}, and {f'{best} is asked for' if wanted else f'there is {best}'}",
                   f"sudo nvpmodel -m {numbers[best]}, then sudo jetson_clocks",
                   # Another mode may want a reboot; only a cluster file says that it is wanted at all.
                   remedy=(("nvpmodel", "-m", numbers[best]), ("sh", "-c", clocks)) if wanted else ())


def _membership(root: Path) -> Finding:
    there = {name: gid for name, gid in _groups(root).items() if name in _GROUPS}
    missing = [name for name, gid in there.items() if gid not in _own_groups()]
    if missing and os.geteuid() != 0:
        user = pwd.getpwuid(os.geteuid()).pw_name
        return Finding("groups", "failed", f"this user is not in {' and '.join(missing)}",
                       f"sudo usermod -aG {','.join(missing)} $USER, then log in again",
                       remedy=(("usermod", "-aG", ",".join(missing), user),))
    return Finding("groups", "ok", ", ".join(there) or "the system has none of " + ", ".join(_GROUPS))


def _timedatectl() -> str:
    try:
        done = subprocess.run(["timedatectl", "show"], capture_output=True, text=True, timeout=_PATIENCE_S,
                              check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _groups(root: Path) -> dict[str, int]:
    if root == _ROOT:
        return {group.gr_name: group.gr_gid for group in grp.getgrall()}
    lines = [line.split(":") for line in procfs.text(root / "etc/group").splitlines()]
    return {parts[0]: int(parts[2]) for parts in lines if len(parts) >= 3 and parts[2].isdigit()}


def _own_groups() -> Collection[int]:
    return {os.getgid(), *os.getgroups()}
