"""Faults beside requests: of the power meter, a callback, a silent stage.  What a strategy raises is in
test_cores.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.process_clusters import PATIENCE, PROMPT

from flowspec_edge.d0.request import Request, RequestHandle
from flowspec_edge.drivers.observe.power import PowerMeter
from flowspec_edge.drivers.processes import subprocesses
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import PeerLost
from flowspec_edge.lab.plain import PlainDecoder

REQUESTS = [Request(PROMPT[: 30 + n], "flowspec", max_new_tokens=12) for n in range(3)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    plain = PlainDecoder(model)
    return [plain.generate(request.prompt, 12, request.sampling)[0] for request in REQUESTS]


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(ClusterSpec(model, 2, threads=1)).start() as made:
        yield made


@pytest.mark.parametrize("where", ["joules_at", "read"])
def test_a_fault_of_the_power_meter_costs_the_figures_alone(
        cluster: ProcessCluster, expected: list[list[int]], where: str, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    def broken(meter: PowerMeter, *arguments: object) -> float:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(PowerMeter, where, broken)
    assert cluster.running is not None
    monkeypatch.setattr(cluster.running.energy, "_meter", PowerMeter((), 1.0))
    results = cluster.generate_many(REQUESTS)
    assert [result.tokens for result in results] == expected
    assert {result.stats.energy_j for result in results} == {None}
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_each_request_has_its_own_exception(cluster: ProcessCluster) -> None:
    """Several threads raise them; an exception object has one traceback."""
    def interrupt(new: list[int]) -> None:
        raise KeyboardInterrupt

    handles = [cluster.submit(REQUESTS[0], interrupt), *map(cluster.submit, REQUESTS)]
    with pytest.raises(KeyboardInterrupt) as caught:
        cluster.serve(lambda: False)
    errors = [handle.exception() for handle in handles]
    assert {type(error) for error in errors} == {KeyboardInterrupt}
    assert len({id(error) for error in [*errors, caught.value]}) == 5


def test_a_silent_stage_is_noticed_while_requests_begin(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that begins while no other runs does not make the stages' silence start again."""
    monkeypatch.setattr(subprocesses, "_STOPPED_S", PATIENCE)  # else its state is noticed first
    with ProcessCluster(ClusterSpec(model, 2, threads=1, dead_after=4.0)).start() as cluster:
        os.kill(cluster.pids[1], signal.SIGSTOP)

        handles: list[RequestHandle] = []
        deadline = time.monotonic() + PATIENCE

        def ask() -> bool:
            if cluster.busy:  # it has begun
                handles[-1].cancel()
            else:
                handles.append(cluster.submit(REQUESTS[0]))
            return time.monotonic() > deadline

        with pytest.raises(PeerLost, match="V2 has been silent for 4 s"):
            cluster.serve(ask)
