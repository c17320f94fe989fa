"""What systemd is told, over sockets as systemd makes them; and that a stage's loop alone shows life."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from kits.services import Ear
from kits.worker_thread import PATIENCE, HeldEngine, Start, segment

from flowspec_edge.drivers.stage.sd_notify import Notifier
from flowspec_edge.messages import Cancel, Open, Segment, Shutdown
from flowspec_edge.stage.engine import SegmentResult

QUICK = "4000"  # µs of the watchdog


@pytest.fixture(params=["path", "abstract"])
def ear(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ear]:
    made = Ear(str(tmp_path / "notify") if request.param == "path" else f"@flowspec-test-{os.getpid()}")
    yield made
    made.close()


def test_the_words(ear: Ear) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": ear.address})
    notifier.status("loads\nlayers")
    notifier.status("loads\nlayers")  # is known
    notifier.ready("serves")
    notifier.status("serves")
    notifier.alive()  # there is no watchdog
    notifier.stopping()
    assert [ear.hear() for _ in range(3)] == ["STATUS=loads layers", "READY=1\nSTATUS=serves", "STOPPING=1"]


def test_life_is_shown_four_times_in_the_watchdogs_time(ear: Ear) -> None:
    environment = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "3600000000"}
    for pid, heard in ((str(os.getpid()), ["WATCHDOG=1"]), ("1", [])):
        notifier = Notifier({**environment, "WATCHDOG_PID": pid})
        notifier.alive()  # would start the watchdog before the service is ready
        notifier.ready("serves")
        notifier.alive()
        notifier.alive()  # so soon it need not be sent again
        notifier.stopping()
        said = ["READY=1\nSTATUS=serves", *heard, "STOPPING=1"]
        assert [ear.hear() for _ in said] == said


def test_the_watchdog_waits_longer_for_a_slow_call(ear: Ear) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "60000000"})
    with notifier.slow():  # a start has a time limit of its own
        pass
    notifier.ready("serves")
    with pytest.raises(KeyError), notifier.slow():
        raise KeyError
    notifier.stopping()
    assert [ear.hear() for _ in range(4)] == [
        "READY=1\nSTATUS=serves", "WATCHDOG_USEC=900000000", "WATCHDOG_USEC=60000000", "STOPPING=1"]
    without = Notifier({"NOTIFY_SOCKET": ear.address})
    without.ready("serves")
    with without.slow():
        pass
    without.stopping()
    assert [ear.hear() for _ in range(2)] == ["READY=1\nSTATUS=serves", "STOPPING=1"]


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:9"},
                                         {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "1"},
                                         {"NOTIFY_SOCKET": "@nowhere", "WATCHDOG_USEC": "soon"}])
def test_without_a_listener_nothing_fails(environment: dict[str, str]) -> None:
    notifier = Notifier(environment)
    notifier.ready("serves")
    notifier.alive()
    notifier.stopping()


class Stuck(HeldEngine):
    """``compute`` does not come back, nor poll, until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def compute(self, admitted: Sequence[Segment], poll: Callable[[], None] | None = None) -> list[SegmentResult]:
        self.started.set()
        assert self.may_end.wait(PATIENCE)
        return super().compute(admitted, poll)


def test_a_stages_loop_shows_life_unless_it_is_stuck(tmp_path: Path, start: Start) -> None:
    ear, engine = Ear(str(tmp_path / "notify")), Stuck()
    stage = start(engine, notifier=Notifier({"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": QUICK}))
    assert ear.until("READY=1") == ["READY=1\nSTATUS=V1 of 1, layers [0, 2)"]
    ear.until("STATUS=V1 of 1, layers [0, 2): connected to D0")
    ear.until("WATCHDOG=1")
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    assert engine.started.wait(PATIENCE)
    while ear.hear(0.2):  # what was said before it got stuck; silence shows by waiting alone
        pass
    engine.may_end.set()
    ear.until("WATCHDOG=1")  # it computes, and polls
    stage.tell(Cancel(1, 0, (0,)))
    stage.tell(Shutdown("done"))
    assert stage.ended() is None
    ear.close()
