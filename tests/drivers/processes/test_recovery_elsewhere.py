"""Stages that were started elsewhere: they, their links and the draft device go and come back; answers go on.

The workers are started once for all tests, without a parent; the link between V1 and V2 can be cut.
Processes and sockets are real; tokens are compared with plain decoding of the unsharded model.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kits.process_clusters import PATIENCE, PROMPT, on_third
from kits.services import free_port
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import ClusterState, Request
from flowspec_edge.d0.run_events import RunEvent, SessionOpened, StagesLost, StagesMissing
from flowspec_edge.drivers.processes import process_cluster
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec, Connected
from flowspec_edge.drivers.ring import Addresses
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import PeerLost
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling

pytestmark = pytest.mark.soak  # workers that are not forked import for long
SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=5)


class Relay:
    """A TCP link that can be cut and mended: listens on a port of its own (``port``) and forwards to
    ``target``, both ways."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = 0
        self.mend()

    def mend(self) -> None:
        """Take connections (again)."""
        server = socket.create_server(("127.0.0.1", self.port))
        self.port = server.getsockname()[1]
        with self._lock:
            self._sockets = [server]
        self._run(self._accept, server)

    def cut(self) -> None:
        """Break what there is, as if the cable's ends had noticed, and take nothing more."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            with suppress(OSError):  # the other end may have closed it
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            one.close()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # the link was cut
            while True:
                near = server.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except ConnectionRefusedError:  # not bound yet; the other end connects again
                    near.close()
                    continue
                with self._lock:
                    if server not in self._sockets:
                        near.close()
                        far.close()
                        return
                    self._sockets += [near, far]
                self._run(self._forward, near, far)
                self._run(self._forward, far, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _run(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


class Boards:
    """Two stages, as an init system would run them."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        ports = [free_port() for _ in range(4)]
        control, output, first, second = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.relay = Relay(ports[3])
        self.addresses = Addresses(control, output, first, ["board-1", "board-2"])
        following = [f"tcp://127.0.0.1:{self.relay.port}", output]
        self._files = [directory / "v1.toml", directory / "v2.toml"]
        for i, file in enumerate(self._files):
            file.write_text(WorkerConfig(
                instance=f"board-{i + 1}", stage=i + 1, stages=2, model=str(model / "target"), threads=1,
                control=control, listen=(first, second)[i], next=following[i], broken_after_s=1.0).dump())
        self.processes = [self._process(file) for file in self._files]

    def _process(self, file: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "flowspec_edge.drivers.stage", "--config", str(file)])

    def signal(self, stage: int, number: signal.Signals) -> None:
        os.kill(self.processes[stage - 1].pid, number)

    def restart(self, stage: int) -> None:
        """What an init system does when one has ended."""
        self.processes[stage - 1].wait(PATIENCE)
        self.processes[stage - 1] = self._process(self._files[stage - 1])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.relay.cut()


class Mender(Observer):
    """Repairs what was lost when it is first told of a loss."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.reasons: list[str] = []
        self.missed: list[list[int]] = []
        self._act = act

    def observe(self, event: RunEvent) -> None:
        match event:
            case StagesLost():
                self.reasons.append(event.reason)
                if len(self.reasons) == 1:
                    self._act()
            case StagesMissing():
                self.missed.append([*event.stages])


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boards]:
    model = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2)
    made = Boards(model, tmp_path_factory.mktemp("boards"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(boards: Boards) -> list[int]:
    return PlainDecoder(boards.model).generate(PROMPT, 40, SAMPLED)[0]


def answer(boards: Boards, strike: Callable[[], None], mender: Mender, **settings: float) -> list[int]:
    """Forty tokens, with ``strike`` between them."""
    streamed: list[int] = []
    act = on_third(strike)

    def on_tokens(new: list[int]) -> None:
        streamed.extend(new)
        act(new)

    with ProcessCluster(ClusterSpec(boards.model, 2, threads=1, observer=mender,
                                    **{"rejoin_within": PATIENCE, **settings}),  # type: ignore[arg-type]
                        Connected(boards.addresses)).start() as cluster:
        tokens = cluster.generate(Request(PROMPT, "flowspec", 40, SAMPLED), on_tokens).tokens
        assert cluster.status.state is ClusterState.RUNNING
    assert streamed == tokens
    return tokens


def test_a_link_that_was_cut_for_a_while(boards: Boards, expected: list[int]) -> None:
    mender = Mender(boards.relay.mend)
    assert answer(boards, boards.relay.cut, mender) == expected
    assert mender.reasons[0].startswith("V1 failed: V1 data out: the connection broke during a session")
    assert [process.poll() for process in boards.processes] == [None, None]


def test_a_link_that_was_cut_for_a_moment(boards: Boards, expected: list[int]) -> None:
    """Messages may be lost although it is back before any check."""

    def strike() -> None:
        boards.relay.cut()
        boards.relay.mend()

    mender = Mender(lambda: None)
    assert answer(boards, strike, mender) == expected
    assert "messages may be lost" in mender.reasons[0] or "one is lost" in mender.reasons[0]
    assert [process.poll() for process in boards.processes] == [None, None]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_that_slept_goes_on(boards: Boards, expected: list[int], stage: int) -> None:
    mender = Mender(lambda: boards.signal(stage, signal.SIGCONT))
    assert answer(boards, lambda: boards.signal(stage, signal.SIGSTOP), mender, dead_after=2.0) == expected
    assert mender.reasons[0].startswith(f"V{stage} has been silent for 2 s")
    assert [process.poll() for process in boards.processes] == [None, None]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_that_was_killed_is_waited_for(boards: Boards, expected: list[int], stage: int) -> None:
    mender = Mender(lambda: boards.restart(stage))
    assert answer(boards, lambda: boards.signal(stage, signal.SIGKILL), mender) == expected
    assert [stage] in mender.missed
    assert mender.missed[-1] == []


def test_a_link_that_stays_cut_is_named(boards: Boards, expected: list[int]) -> None:
    with pytest.raises(PeerLost, match=r"not back within 4 s: V1 \(cannot reach V2\)"):
        answer(boards, boards.relay.cut, Mender(lambda: None), rejoin_within=4.0)
    boards.relay.mend()
    assert answer(boards, lambda: None, Mender(lambda: None)) == expected


def test_a_draft_device_whose_clock_is_behind_after_a_reboot(boards: Boards, expected: list[int],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages would not wait for the Open of a session whose number is lower than the last."""
    numbers: list[list[int]] = []

    class Opened(Mender):
        def observe(self, event: RunEvent) -> None:
            if isinstance(event, SessionOpened):
                numbers[-1].append(event.session)

    for now in (2e9, 0.0):
        numbers.append([])
        monkeypatch.setattr(process_cluster.time, "time", lambda now=now: now)
        assert answer(boards, lambda: None, Opened(lambda: None)) == expected
    assert max(numbers[0]) < min(numbers[1])


DRAFT_DEVICE = """
import sys
from pathlib import Path
from flowspec_edge.drivers.ring import Addresses
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec, Connected
from flowspec_edge.d0.request import ClusterState, Request
model, *places = sys.argv[1:]
addresses = Addresses(*places, ["board-1", "board-2"])
with ProcessCluster(ClusterSpec(Path(model), 2, threads=1), Connected(addresses)).start() as cluster:
    cluster.generate(Request(list(range(70)), "flowspec", 1500), lambda new: print(*new, flush=True))
"""


def test_another_draft_device_finds_the_stages_as_new(boards: Boards, expected: list[int]) -> None:
    """The one before was killed during an answer."""
    where = boards.addresses
    places = [where.control, where.output, where.first]
    command = [sys.executable, "-c", DRAFT_DEVICE, str(boards.model), *places]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as d0:
        assert d0.stdout is not None
        for _ in range(3):
            assert d0.stdout.readline()
        d0.kill()
    mender = Mender(lambda: None)
    assert answer(boards, lambda: None, mender) == expected
    assert mender.reasons == []
    assert [process.poll() for process in boards.processes] == [None, None]
