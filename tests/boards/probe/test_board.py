"""A board by files as L4T and Linux write them, and this machine."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from kits import jetson_boards

from flowspec_edge.boards.probe.board import BoardInfo, read_board, resident_mb

MEMINFO = """\
MemTotal:        7802680 kB
MemFree:         1262464 kB
MemAvailable:    5812340 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
"""
CPUINFO = "".join(f"processor\t: {n}\nBogoMIPS\t: 62.50\nFeatures\t: fp asimd\nCPU part\t: 0xd42\n\n"
                  for n in range(6))


def write(root: Path, name: str, text: str | bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def orin(tmp_path: Path) -> Path:
    write(tmp_path, "sys/firmware/devicetree/base/model", b"NVIDIA Jetson Orin Nano Developer Kit\0")
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    write(tmp_path, "proc/meminfo", MEMINFO)
    for name in ("etc/nv_tegra_release", "etc/nvpmodel.conf"):
        write(tmp_path, name, (jetson_boards.FILES / name).read_bytes())
    write(tmp_path, "var/lib/nvpmodel/status", "pmode:0002 fmode:quiet")
    for zone, temperature in enumerate(["47218", "49531", "-256000", "", "48000"]):
        write(tmp_path, f"sys/class/thermal/thermal_zone{zone}/temp", temperature)
    for core, kilohertz in enumerate([1728000, 729600]):
        write(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", f"{kilohertz}\n")
    write(tmp_path, "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq", "9\n")
    write(tmp_path, "sys/class/devfreq/17000000.gpu/cur_freq", "1020000000\n")
    return tmp_path


def test_an_orin_nano(orin: Path) -> None:
    board = read_board(orin)
    assert board.title == "NVIDIA Jetson Orin Nano Developer Kit, L4T 36.4.3"
    assert board.power_mode == "MAXN_SUPER"
    assert board.temperature_c == 49.5
    assert board.clocks_mhz == {"cpu": 1728, "gpu": 1020}
    assert board.total_mb == pytest.approx(7802680 * 1024 / 1e6)  # 7620 MiB, as tegrastats has it
    assert board.available_mb == pytest.approx(5812340 * 1024 / 1e6)


def test_a_processor_where_there_is_no_device_tree(tmp_path: Path) -> None:
    cores = [f"processor\t: {n}\nmodel name\t: Made Up 9000\n\n" for n in range(2)]
    write(tmp_path, "proc/cpuinfo", "".join(cores))
    assert read_board(tmp_path).machine == "Made Up 9000, 2 cores"


def test_nothing_at_all(tmp_path: Path) -> None:
    assert read_board(tmp_path) == BoardInfo()


def test_damaged_files_do_not_raise(orin: Path) -> None:
    chance = random.Random(0)
    for file in [path for path in sorted(orin.rglob("*")) if path.is_file()]:
        before = file.read_bytes()
        for damage in (b"", b"\xff\xfe\0", chance.randbytes(200), before[: len(before) // 2]):
            file.write_bytes(damage)
            board = read_board(orin)
            assert "\0" not in board.machine
        file.write_bytes(before)


def test_a_power_mode_that_the_configuration_does_not_name(orin: Path) -> None:
    write(orin, "var/lib/nvpmodel/status", "pmode:0009")
    assert read_board(orin).power_mode == ""


def test_this_machine() -> None:
    board = read_board()
    assert board.machine
    assert board.total_mb is not None
    assert board.available_mb is not None
    assert board.total_mb == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6)
    assert 0 < board.available_mb <= board.total_mb


def test_what_a_process_holds() -> None:
    held = bytearray(os.urandom(1)) * 64_000_000
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident_mb(os.getpid()) == pytest.approx(resident / 1e6, abs=4)
    assert resident > len(held)
    assert resident_mb(2**22 + 1) is None
