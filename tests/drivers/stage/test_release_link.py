"""A stage that its draft device refuses ends if a restart may bring the right release, and else waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.worker_thread import PATIENCE, HeldEngine

from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.drivers.stage.release_link import ReleaseLink
from flowspec_edge.drivers.stage.worker import Worker, connect
from flowspec_edge.errors import FlowspecError, OtherRelease
from flowspec_edge.messages import Heartbeat, Hello
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import Tuning, ZmqTransport

D0, BEFORE, STAGE = keys.generate(), keys.generate(), keys.generate()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for release in ("old", "new"):
        (tmp_path / release / "etc").mkdir(parents=True)
    (tmp_path / "current").symlink_to("old")
    return tmp_path


class Refused:
    """A stage in a thread and a hub; ``known``: the stage's instance id and key there."""

    def __init__(self, home: Path, d0: keys.KeyPair, known: tuple[str, bytes]) -> None:
        self.stopping = False
        self.error: BaseException | None = None
        self._transports = [ZmqTransport(pair, Tuning(linger_ms=0)) for pair in (d0, STAGE)]
        self.hub = self._transports[0].hub("tcp://127.0.0.1:*", "D0 control", dict([known]))
        here = "tcp://127.0.0.1:*"
        config = WorkerConfig(instance="v1-old", stage=1, stages=1, model="m", control=self.hub.endpoint,
                              listen=here, next=self.hub.endpoint, heartbeat_s=0.05, key_file="-",
                              control_key=D0.public.decode(), next_key=D0.public.decode(),
                              previous_key=D0.public.decode())
        worker = Worker(config, connect(config, self._transports[1]), HeldEngine(),
                        Hello("v1-old", 1, 1, (0, 2), "digest"), stopping=lambda: self.stopping,
                        release=ReleaseLink(home / "current/etc/verify-1.toml"))
        self.thread = threading.Thread(target=self._run, args=[worker], daemon=True)
        self.thread.start()

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        except FlowspecError as error:
            self.error = error

    def ends(self) -> BaseException | None:
        """Drop what comes, as a hub of other stages does, until the stage's thread has ended."""
        for _ in range(int(PATIENCE / 0.05)):
            assert self.hub.receive(0.05) is None
            if not self.thread.is_alive():
                break
        assert not self.thread.is_alive()
        return self.error

    def close(self) -> None:
        self.stopping = True
        self.thread.join(PATIENCE)
        for transport in self._transports:
            transport.close()


CASES = {
    "D0 has another key": (BEFORE, ("v1-old", STAGE.public)),
    "D0 does not admit the stage's key": (D0, ("v1-old", BEFORE.public)),
    "D0 knows the key under another instance id": (D0, ("v1-new", STAGE.public)),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def refused(home: Path, request: pytest.FixtureRequest) -> Iterator[Refused]:
    (home / "unsettled").touch()
    made = Refused(home, *request.param)
    yield made
    made.close()


def test_a_refused_stage_ends_while_a_rollout_is_unfinished(refused: Refused) -> None:
    error = refused.ends()
    assert isinstance(error, OtherRelease)
    assert error.exit_code == 75
    assert str(error).endswith("the draft device belongs to another release")


def test_without_a_rollout_it_waits_for_another_d0(home: Path) -> None:
    stage = Refused(home, *CASES["D0 knows the key under another instance id"])
    while stage.hub.dropped < 5:  # its Hello and heartbeats, each answered with a Refusal
        assert stage.hub.receive(PATIENCE) is None
    assert stage.thread.is_alive()
    (home / "current").unlink()
    (home / "current").symlink_to("new")  # from now on a restart brings another release
    assert isinstance(stage.ends(), OtherRelease)
    stage.close()


def test_a_stage_that_is_known_stays_during_a_rollout(home: Path) -> None:
    (home / "unsettled").touch()
    stage = Refused(home, D0, ("v1-old", STAGE.public))
    heard = 0
    while heard < 10:
        item = stage.hub.receive(PATIENCE)
        assert item is not None
        heard += isinstance(item[1], Heartbeat)
    assert stage.thread.is_alive()
    stage.close()
    assert stage.error is None
