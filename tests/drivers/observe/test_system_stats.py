"""How a board is, from files as the kernel writes them, and from this machine."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from flowspec_edge.drivers.observe.system_stats import SystemStats, read_system_stats

FILES = {
    "proc/meminfo": "MemTotal:        7802680 kB\nMemFree: 1262464 kB\nMemAvailable:    5812340 kB\n",
    "proc/loadavg": "1.75 0.50 0.25 2/345 6789\n",
    "proc/self/status": "Name:\tpython3\nVmSize:\t  900000 kB\nVmRSS:\t  123456 kB\n",
    "sys/devices/system/cpu/online": "0-3,6\n",
    **{f"sys/class/thermal/thermal_zone{zone}/temp": text
       for zone, text in enumerate(("47218\n", "-256000\n", "49531\n", "", "900000\n"))},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_board(root: Path) -> None:
    assert read_system_stats(root) == {
        "memory_total": 7802680 * 1024, "memory_available": 5812340 * 1024, "resident": 123456 * 1024,
        "temperature_c": 49.5, "load": 1.75, "cpus": 5}


@pytest.mark.parametrize(("file", "missing"), [
    ("proc/meminfo", {"memory_total", "memory_available"}),
    ("proc/loadavg", {"load"}),
    ("proc/self/status", {"resident"}),
    ("sys/devices/system/cpu/online", {"cpus"}),
])
def test_what_a_board_does_not_tell_is_left_out(root: Path, file: str, missing: set[str]) -> None:
    whole = read_system_stats(root)
    (root / file).unlink()
    assert read_system_stats(root) == {name: value for name, value in whole.items() if name not in missing}


def test_no_nonsense_makes_it_fail(root: Path) -> None:
    chance = random.Random(0)
    for name, before in FILES.items():
        for damage in (b"", b"\xff\xfe\0", b"nan", b"-1", b"1-2-3,", chance.randbytes(200)):
            (root / name).write_bytes(damage)
            assert set(read_system_stats(root)) <= {"memory_total", "memory_available", "resident",
                                              "temperature_c", "load", "cpus"}
        (root / name).write_text(before)


def test_files_are_read_once_a_second(root: Path) -> None:
    now = [100.0]
    stats = SystemStats(root, lambda: now[0])
    assert stats.read()["load"] == 1.75
    (root / "proc/loadavg").write_text("9.00 0.50 0.25 2/345 6789\n")
    now[0] += 0.9
    stats.read()["load"] = 5.0  # the caller's own copy
    assert stats.read()["load"] == 1.75
    now[0] += 0.1
    assert stats.read()["load"] == 9.0


def test_this_machine() -> None:
    told = read_system_stats()
    page = os.sysconf("SC_PAGE_SIZE")
    assert told["memory_total"] == pytest.approx(page * os.sysconf("SC_PHYS_PAGES"))
    assert 0 < told["memory_available"] < told["memory_total"]
    assert told["load"] >= 0
    assert told["cpus"] == os.cpu_count()
    held = bytearray(os.urandom(1)) * 64_000_000
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    assert read_system_stats()["resident"] == pytest.approx(resident, abs=4e6)
    assert resident > len(held)
