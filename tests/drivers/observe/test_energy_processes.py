"""The energy of requests on real processes; D0 and V1 share a board, V2 has its own.

A board's sensor is a directory with constant power, so that a request's joules are its board's watts times
the seconds that the request was open there, which this side's clock bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from kits.process_clusters import until
from kits.rail_files import CHIP, board, once_measured, rail
from prometheus_client.parser import text_string_to_metric_families

from flowspec_edge.d0.observer import Observers
from flowspec_edge.d0.request import Request, Result, Stats
from flowspec_edge.drivers.observe.power import PowerMeter, board_meter
from flowspec_edge.drivers.observe.system_stats import SystemStats
from flowspec_edge.drivers.processes.addresses import Loopback
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec, Here
from flowspec_edge.serving.admission import Readiness
from flowspec_edge.serving.dashboard.feed import Feed
from flowspec_edge.serving.metrics import Metrics

pytestmark = pytest.mark.slow

WATTS = (5.0, 20.0)  # of each board
PLACES = (0, 0, 1)  # the board of D0, V1, V2
STAGES = len(PLACES) - 1
PROMPT = [(7 * i + 3) % 90 for i in range(70)]
REQUEST = Request(PROMPT, "flowspec", 8)


class Boards(Loopback):
    """Places on this machine, each with the sensor of a board of its own."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        return ["env", f"FLOWSPEC_SYSFS={self.roots[PLACES[place]]}", *command]


@dataclass
class Running:
    clusters: ProcessCluster
    roots: Sequence[Path]
    metrics: Metrics
    feed: Feed
    meter: PowerMeter

    def ask(self) -> tuple[Stats, float]:
        """A request's figures, and the seconds that it took, by this side's clock."""
        began = time.monotonic()
        result: Result = self.clusters.generate(REQUEST)
        return result.stats, time.monotonic() - began

    def ask_measured(self) -> tuple[Stats, float]:
        """The same of a request whose energy is known; the last of a few if none is."""
        return once_measured(self.ask, lambda asked: asked[0].energy_j is not None)

    def page(self) -> dict[tuple[str, str], float]:
        """Power and energy by device, as /metrics says."""
        text = self.metrics.page("text/plain", Readiness(True, "", 0, 0, 0.0))[0].decode()
        return {(sample.name, sample.labels["device"]): sample.value
                for family in text_string_to_metric_families(text) for sample in family.samples
                if sample.name.startswith(("flowspec_device_power", "flowspec_device_energy"))}

    def listen(self, true: Callable[[], bool]) -> None:
        """Drive the cluster until heartbeats have told something."""
        self.clusters.serve(true)


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    roots = [board(tmp_path_factory.mktemp(f"board-{place}"), watts, boot=f"boot {place}")
             for place, watts in enumerate(WATTS)]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ends:
        patch.setenv("FLOWSPEC_SYSFS", str(roots[0]))
        meter = ends.enter_context(board_meter())
        assert meter is not None
        metrics, feed = Metrics(STAGES, SystemStats(meter=meter).read, {}), Feed()
        clusters = ends.enter_context(open_cluster(ClusterSpec(tiny_model, STAGES, threads=1,
                                                               observer=Observers([metrics, feed]),
                                                               meter=meter, idle_s=1.3, rejoin_within=60),
                                                   Here(Boards(roots))))
        clusters.generate(REQUEST)
        yield Running(clusters, roots, metrics, feed, meter)


def test_a_request_takes_the_watts_of_all_boards_for_its_time(running: Running) -> None:
    stats, seconds = running.ask_measured()
    assert stats.energy_j is not None
    assert sum(WATTS) * stats.decode_s < stats.energy_j < sum(WATTS) * seconds * 1.001
    for place, told in zip(PLACES[1:], stats.stages, strict=True):
        assert WATTS[place] * stats.decode_s < told["session_j"] < WATTS[place] * seconds * 1.001
    assert stats.energy_above_idle_j == pytest.approx(0.0, abs=1e-3 * stats.energy_j)  # it draws no more


def test_requests_beside_one_another_share_the_boards(running: Running) -> None:
    clusters = running.clusters

    def ask() -> tuple[list[Stats], float]:
        began = time.monotonic()
        tickets = [clusters.submit(REQUEST), clusters.submit(Request(PROMPT[3:], "chunk_pp", 8))]
        clusters.serve(lambda: all(ticket.done() for ticket in tickets))
        return [ticket.result().stats for ticket in tickets], time.monotonic() - began

    both, seconds = once_measured(ask, lambda asked: all(stats.energy_j is not None for stats in asked[0]))
    joules = sum(stats.energy_j or 0.0 for stats in both)
    assert min(stats.energy_j or 0.0 for stats in both) > 0
    assert sum(WATTS) * max(s.decode_s for s in both) < joules < sum(WATTS) * seconds * 1.001


def test_what_a_board_draws_more_than_idle_is_the_requests(running: Running) -> None:
    rail(running.roots[0], 1, WATTS[0] + 30)
    until(lambda: running.meter.read().get("watts") == WATTS[0] + 30)  # nothing runs here meanwhile
    stats, seconds = running.ask_measured()
    assert stats.energy_above_idle_j is not None
    assert 30 * stats.decode_s < stats.energy_above_idle_j < 30 * seconds * 1.001
    rail(running.roots[0], 1, WATTS[0])
    until(lambda: running.meter.read().get("watts") == WATTS[0])


def test_metrics_and_page_tell_each_boards_power_once(running: Running) -> None:
    running.listen(lambda: len(running.page()) == 4)
    before = running.page()
    assert {device: value for (name, device), value in before.items() if name.endswith("watts")} == {
        "D0": WATTS[0], "V2": WATTS[1]}
    energy = "flowspec_device_energy_joules_total"
    running.listen(lambda: all(running.page().get((energy, device), 0.0) > before[energy, device]
                               for device in ("D0", "V2")))
    running.feed.boards.sample(SystemStats(meter=running.meter).read(), time.monotonic())
    shown = running.feed.boards.event(time.monotonic())["boards"]
    assert [told["watts"] for told in shown] == [WATTS[0], None, WATTS[1]]
    assert [told["host"] for told in shown] == [0, 0, 2]
    stats, _ = running.ask_measured()
    assert stats.energy_j is not None
    assert running.feed.stats.event([], 0.0)["joules_per_token"] == pytest.approx(stats.energy_j / 8)


def test_what_leaves_a_board_out_is_no_figure(running: Running) -> None:
    current = running.roots[1] / CHIP / "curr1_input"
    kept = current.read_text()
    current.unlink()
    running.listen(lambda: ("flowspec_device_power_watts", "V2") not in running.page())
    stats, _ = running.ask()
    assert (stats.energy_j, stats.energy_above_idle_j) == (None, None)
    assert ["session_j" in told for told in stats.stages] == [True, False]
    assert running.feed.stats.event([], 0.0)["joules_per_token"] is None
    current.write_text(kept)
    running.listen(lambda: ("flowspec_device_power_watts", "V2") in running.page())
    assert running.ask_measured()[0].energy_j is not None
