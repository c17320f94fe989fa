"""Sessions share a board's energy: none is lost, none counts twice, idle power is that of idle time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kits.rail_files import CHIP, board, rail

from flowspec_edge.d0.energy import cluster_energy
from flowspec_edge.drivers.observe.power import (
    PowerMeter,
    SessionEnergy,
)
from flowspec_edge.drivers.observe.power_rails import total_rails
from flowspec_edge.util.jetson import power_rails


class Bench:
    """A board whose power the test sets, and its book, on a clock that the test moves."""

    def __init__(self, root: Path, watts: float = 5.0) -> None:
        self.root, self.now = board(root, watts), 0.0
        self.meter = PowerMeter(total_rails(root, power_rails()), 7.0, lambda: self.now)
        self.energy = SessionEnergy(self.meter, lambda: self.now, settle_s=1.0)
        self.meter.sample()

    def draw(self, watts: float) -> None:
        """From this moment on: a step, as steep as a sampler of any rate would have it."""
        self.meter.sample()
        rail(self.root, 1, watts)
        self.meter.sample()

    def run(self, seconds: float, every: float = 0.1, update: bool = True) -> None:
        for _ in range(round(seconds / every)):
            self.now += every
            self.meter.sample()
            if update:
                self.energy.update()


def test_a_session_takes_what_the_board_uses_meanwhile(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(4)  # the first second is still settling
    bench.draw(15.0)
    bench.energy.open(1)
    bench.run(2, update=False)
    assert bench.energy.close(1) == {"session_j": pytest.approx(30.0), "board": 7.0,
                                   "session_above_idle_j": pytest.approx(20.0)}
    assert bench.energy.idle_watts == pytest.approx(5.0)


def test_the_time_after_a_session_is_not_idle_yet(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(3)
    bench.energy.open(1)
    bench.draw(15.0)
    bench.run(1)
    bench.energy.close(1)
    bench.run(0.9)  # the board is still hot and fast
    bench.draw(5.0)
    bench.run(3)
    assert bench.energy.idle_watts == pytest.approx(5.0)


def test_without_idle_time_nothing_is_subtracted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.energy.open(1)
    bench.run(2)
    assert bench.energy.close(1) == {"session_j": pytest.approx(10.0), "board": 7.0}
    assert bench.energy.idle_watts is None


def test_time_in_which_the_process_did_other_work_is_not_booked(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.draw(30.0)
    bench.run(10, update=False)
    bench.energy.skip()
    bench.draw(5.0)
    bench.run(3)
    assert bench.energy.idle_watts == pytest.approx(5.0)
    bench.energy.open(1)
    bench.run(1, update=False)
    bench.energy.skip()  # no effect while a session is open
    bench.run(1)
    assert bench.energy.close(1)["session_j"] == pytest.approx(10.0)


def test_work_is_the_sessions_own_and_waiting_is_shared(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(3)
    bench.energy.open(1)
    bench.energy.open(2)
    bench.draw(20.0)
    bench.energy.work_for(1)
    bench.run(1, update=False)
    bench.energy.work_for()
    bench.draw(6.0)
    bench.run(1, update=False)
    assert bench.energy.close(1) == {"session_j": pytest.approx(23.0), "board": 7.0,
                                   "session_above_idle_j": pytest.approx(23.0 - 5 * 1.5)}
    assert bench.energy.close(2) == {"session_j": pytest.approx(3.0), "board": 7.0,
                                   "session_above_idle_j": pytest.approx(3.0 - 5 * 0.5)}


def test_shares_add_up_to_the_boards_energy(tmp_path: Path) -> None:
    """Whatever opens, works and closes in whatever order; the meter's own total is the judge."""
    chance = random.Random(3)
    bench = Bench(tmp_path)
    bench.energy.open(0)
    began = bench.meter.joules_at(bench.now)
    assert began is not None
    running, total = {0}, 0.0
    for number in range(1, 400):
        bench.draw(chance.uniform(4, 25))
        bench.now += chance.uniform(0.001, 0.3)
        match chance.choice(["open", "close", "work", "wait"]):
            case "open":
                bench.energy.open(number)
                running.add(number)
            case "close" if len(running) > 1:
                over = running.pop()
                total += bench.energy.close(over).get("session_j", 0.0)
            case "work":
                bench.energy.work_for(chance.choice([*running, -1]))
            case _:
                bench.energy.work_for()
    bench.meter.sample()
    total += sum(bench.energy.close(session).get("session_j", 0.0) for session in sorted(running))
    used = bench.meter.joules_at(bench.now)
    assert used is not None
    assert total == pytest.approx(used - began, rel=1e-3)


def test_sessions_that_are_not_among_the_open_ones_are_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.energy.open(1)
    bench.energy.open(2, among=[2])
    bench.run(1)
    assert bench.energy.close(1) == {}
    assert bench.energy.close(2)["session_j"] == pytest.approx(5.0)


def test_a_sensor_that_fails_leaves_sessions_without_a_figure(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(3)
    bench.energy.open(1)
    bench.energy.open(2)
    bench.run(1)
    (tmp_path / CHIP / "curr1_input").unlink()
    bench.run(2)
    assert bench.energy.close(1) == {}
    bench.energy.open(3)
    bench.run(60)
    rail(tmp_path, 1, 5.0)
    bench.run(1)
    assert bench.energy.close(2) == bench.energy.close(3) == {}  # some of it was not measured
    bench.energy.open(4)
    bench.run(1)
    assert bench.energy.close(4)["session_j"] == pytest.approx(5.0)  # and nothing of the time before
    assert bench.energy.idle_watts == pytest.approx(5.0)


@pytest.mark.parametrize(("told", "whole"), [
    ([(1.0, 10.0, 4.0), (2.0, 20.0, 6.0)], (30.0, 10.0)),
    ([(1.0, 10.0, 4.0), (1.0, 11.0, 5.0), (2.0, 20.0, 6.0), (2.0, 1.0, 1.0)], (30.0, 10.0)),
    ([(1.0, 10.0, 4.0), (2.0, 20.0, None)], (30.0, None)),
    ([(1.0, 10.0, 4.0), None], (None, None)),
    ([(1.0, 10.0, 4.0), (None, 20.0, 6.0)], (None, None)),
])
def test_a_cluster_is_the_sum_of_its_boards(told: list[tuple[float | None, float, float | None] | None],
                                            whole: tuple[float | None, float | None]) -> None:
    processes = [{} if one is None else
                 {**({} if one[0] is None else {"board": one[0]}), "session_j": one[1],
                  **({} if one[2] is None else {"session_above_idle_j": one[2]})} for one in told]
    assert cluster_energy(processes) == whole
