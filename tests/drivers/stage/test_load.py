"""A stage's loop while a device, which does not keep up with the launches, computes; and its first load."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from kits.int4_matrices import DEVICES
from kits.worker_thread import PATIENCE, Start, segment

from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.drivers.stage.load import load_engine
from flowspec_edge.messages import Cancel, Close, Credit, Heartbeat, Open
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.forward import LaunchPacer


class Device:
    """Each step takes until the test says so; what was said once holds for all."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self.done = threading.Event()

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self.done.wait(PATIENCE)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(LaunchPacer, "for_device", lambda _: LaunchPacer(lambda: device))
    return device


def test_a_cancel_counts_though_all_launches_have_been_made(start: Start, real: StageEngine, device: Device
                                                            ) -> None:
    stage = start(real)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0, rows=3))
    assert device.waited_for.wait(PATIENCE)  # two layers and the copies: the host is at the end
    stage.tell(Cancel(1, 0, (0,)))
    device.done.set()
    assert len(stage.result().numbers) == 0
    beat = stage.hear(Heartbeat, lambda beat: beat.counters["cancelled"] == 1)
    assert (beat.counters["segments"], beat.counters["rows"]) == (1, 0)


def test_a_session_that_ends_meanwhile_leaves_its_cache_alone(start: Start, real: StageEngine, device: Device
                                                              ) -> None:
    stage = start(real)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0, rows=3))
    assert device.waited_for.wait(PATIENCE)
    stage.tell(Close(1))
    stage.tell(Open(2, 0, 64))
    device.done.set()
    stage.hear(Credit, lambda credit: credit.session == 1)  # V1 has room again
    stage.give(segment(0, rows=3, session=2))
    result = stage.result()  # the first: nothing of an ended session is sent
    assert (result.session, result.numbers.tolist()) == (2, [0, 1, 2])


@pytest.mark.parametrize("where", DEVICES)
def test_a_loaded_stage_has_memory_for_its_caches_and_no_session(where: str, worker_model: Path) -> None:
    config = WorkerConfig(instance="v1", stage=1, stages=1, model=str(worker_model), device=where,
                          cache_rows=400, control="ipc:///c", listen="ipc:///l", next="ipc:///n")
    engine, hello = load_engine(config)
    assert hello.layers == (0, 2)
    assert isinstance(engine, StageEngine)
    assert (engine.cache_rows, engine.sessions, engine.retained) == (400, (), {})
    assert set(engine.counters.values()) == {0}
