"""Power from files as the kernel's ina3221 driver writes them, and energy as its integral."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest
from kits import rail_files
from kits.process_clusters import until
from kits.rail_files import CHIP, board, rail, write

from flowspec_edge.drivers.observe.power import PowerMeter, board_meter, board_number
from flowspec_edge.drivers.observe.power_rails import read_watts, total_rails
from flowspec_edge.drivers.observe.system_stats import SystemStats
from flowspec_edge.util.jetson import power_rails

ORIN_NANO = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
AGX_ORIN = "NVIDIA Jetson AGX Orin Developer Kit"
THOR = "NVIDIA Jetson AGX Thor Developer Kit"


def watts(root: Path) -> float | None:
    return read_watts(total_rails(root, power_rails()))


def chip(root: Path, address: str, rails: dict[str, float]) -> None:
    for channel, (label, power) in enumerate(rails.items(), start=1):
        directory = f"sys/bus/i2c/drivers/ina3221/{address}/hwmon/hwmon{address[-1]}"
        write(root, f"{directory}/in{channel}_label", f"{label}\n")
        rail(root, channel, power, directory)


@pytest.mark.parametrize("model", [ORIN_NANO, rail_files.ORIN_NX])
def test_vdd_in_is_a_whole_module(tmp_path: Path, model: str) -> None:
    assert watts(board(tmp_path, 12.5, model)) == 12.5  # the other rails are parts of it


def test_an_agx_orin_is_the_sum_of_three_rails_on_two_chips(tmp_path: Path) -> None:
    write(tmp_path, "sys/firmware/devicetree/base/model", f"{AGX_ORIN}\0")
    chip(tmp_path, "2-0040", {"VDD_GPU_SOC": 8.0, "VDD_CPU_CV": 2.5, "VIN_SYS_5V0": 4.0})
    chip(tmp_path, "2-0041", {"NC": 1.0, "VDDQ_VDD2_1V8AO": 0.7})
    assert watts(tmp_path) == 14.5
    chip(tmp_path, "2-0040", {"VDD_GPU_SOC": 8.0, "NC": 2.5, "VIN_SYS_5V0": 4.0})
    assert watts(tmp_path) is None  # two of three are no total


@pytest.mark.parametrize(("model", "rails", "total"), [
    (THOR, {"VIN": 31.0, "VDD_GPU": 9.0}, 31.0),
    ("Another board", {"VDD_SOC": 3.0, "VDD_IN": 9.0}, 9.0),
    ("Another board", {"VIN": 11.0}, 11.0),
    ("Another board", {"VDD_GPU": 9.0, "VDD_CPU": 3.0}, None),
    (rail_files.ORIN_NX, {"NC": 12.0, "": 12.0}, None),
])
def test_the_rails_of_other_boards(tmp_path: Path, model: str, rails: dict[str, float], total: float | None
                                   ) -> None:
    write(tmp_path, "sys/firmware/devicetree/base/model", f"{model}\0")
    chip(tmp_path, "1-0040", rails)
    assert watts(tmp_path) == total


def test_a_board_without_a_sensor_has_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSPEC_SYSFS", str(tmp_path))
    with board_meter() as meter:
        assert meter is None
    assert "watts" not in SystemStats(tmp_path, meter=meter).read()
    board(tmp_path, 10.0)
    with board_meter(enabled=False) as meter:
        assert meter is None
    with board_meter() as meter:
        assert meter is not None
        assert meter.read()["watts"] == 10.0


@pytest.mark.parametrize(("content", "watts"), [
    (b"", None), (b"\xff\xfe", None), (b"nan\n", None), (b"1e3\n", None), (b"9" * 5000, None), (b"9" * 12, None),
    (b"5000 mV", None), (b"-8\n", 0.0)])
def test_garbage_is_no_reading_and_a_current_a_little_below_zero_is_none(tmp_path: Path, content: bytes,
                                                                         watts: float | None) -> None:
    rails = total_rails(board(tmp_path, 10.0), power_rails())
    (tmp_path / CHIP / "curr1_input").write_bytes(content)
    assert read_watts(rails) == watts


def test_a_channel_that_cannot_be_read_is_no_reading(tmp_path: Path) -> None:
    """As a bus that is stuck gives EIO: here a directory gives EISDIR."""
    rails = total_rails(board(tmp_path, 10.0), power_rails())
    (tmp_path / CHIP / "in1_input").unlink()
    (tmp_path / CHIP / "in1_input").mkdir()
    assert read_watts(rails) is None


class Sampled:
    """A meter on a clock that the test moves."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = board(root, 0.0), 100.0
        self.meter = PowerMeter(total_rails(root, power_rails()), 7.0, lambda: self.now)

    def at(self, now: float, power: float) -> None:
        self.now = now
        rail(self.root, 1, power)
        self.meter.sample()


def test_energy_is_the_integral_of_power(tmp_path: Path) -> None:
    """Against a sum in double precision over a grid that is 10^4 times as fine."""
    chance = random.Random(1)
    sampled = Sampled(tmp_path)
    moments = np.cumsum([100.0, *(chance.choice([0.1, 0.13, 0.4]) for _ in range(60))])
    powers = [round(chance.uniform(3, 25), 2) for _ in moments]
    for now, power in zip(moments, powers, strict=True):
        sampled.at(float(now), power)
    grid = np.linspace(moments[0], moments[-1], 600_001)
    drawn = np.interp(grid, moments, powers)
    brute = float(((drawn[1:] + drawn[:-1]) / 2 * np.diff(grid)).sum())
    assert sampled.meter.read() == {"watts": powers[-1], "energy_j": pytest.approx(brute, rel=1e-6),
                                    "board": 7.0}
    assert sampled.meter.joules_at(sampled.now + 0.5) == pytest.approx(brute + powers[-1] / 2, rel=1e-6)


def test_energy_never_falls(tmp_path: Path) -> None:
    sampled, energy = Sampled(tmp_path), []
    for step, power in enumerate([5.0, 20.0, 0.0, 0.0, 15.0, 1.0]):
        sampled.at(100 + step / 10, power)
        sampled.now += 0.05
        energy.append(sampled.meter.read()["energy_j"])
    assert all(before <= after for before, after in itertools.pairwise(energy))


def test_a_sensor_that_is_silent_for_a_second_says_nothing(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    assert sampled.meter.read() == {}
    assert sampled.meter.joules_at(100.0) is None
    sampled.at(100.0, 10.0)
    (tmp_path / CHIP / "in1_input").unlink()
    for now in (100.5, 101.0):
        sampled.now = now
        sampled.meter.sample()
        assert sampled.meter.read()["watts"] == 10.0
    sampled.now = 101.1
    assert sampled.meter.read() == {}
    assert sampled.meter.joules_at(101.1) is None
    rail(tmp_path, 1, 20.0)
    sampled.at(104.0, 20.0)
    assert sampled.meter.read() == {"watts": 20.0, "energy_j": 15.0 * 4, "board": 7.0}


def test_a_read_that_hangs_blocks_no_other_thread(tmp_path: Path) -> None:
    """As on a bus that is stuck; here a pipe without a writer."""
    now = [100.0]
    meter = PowerMeter(total_rails(board(tmp_path, 10.0), power_rails()), clock=lambda: now[0])
    meter.start()
    assert meter.read()["watts"] == 10.0
    current = tmp_path / CHIP / "curr1_input"
    current.unlink()
    os.mkfifo(current)
    written = current.open("wb", buffering=0)  # returns once the sampler has opened it to read
    now[0] += 2
    assert meter.read() == {}
    meter.close()
    written.write(b"4000\n")
    written.close()
    until(lambda: meter.read().get("watts") == 20.0)


def test_a_board_has_one_number_and_another_board_another(tmp_path: Path) -> None:
    first, second = (board_number(board(tmp_path / boot, 1.0, boot=boot)) for boot in ("a", "b"))
    assert first is not None
    assert first != second
    write(tmp_path / "b", "etc/machine-id", "a container beside it\n")
    assert board_number(tmp_path / "b") not in (first, second)
    assert first == board_number(tmp_path / "a")
    assert first == float(int(first)) < 2**53  # exact on its way through a float


def test_boards_that_cannot_be_told_apart_have_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    """Else all of them would count as one."""
    monkeypatch.setenv("FLOWSPEC_SYSFS", str(board(tmp_path, 10.0)))
    (tmp_path / "proc/sys/kernel/random/boot_id").unlink()
    assert board_number(tmp_path) is None
    with board_meter() as meter:
        assert meter is None
