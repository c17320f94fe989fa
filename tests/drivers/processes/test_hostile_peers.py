"""Hostile peers on the live sockets of D0 and of its stages, while a request runs.

Strangers without a key never change an answer. A holder of a stage's key can end answers with one clear
error, but neither the cluster nor a stage's process, and the next answer is right.  What is forged can always
be told from the real thing: a device whose key was stolen can also send plausible wrong hidden states,
without any sign of it.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from kits.byte_mutations import mutations
from kits.lost_stages import Striker
from kits.process_clusters import PATIENCE, PROMPT, until
from kits.services import own_address

from flowspec_edge import messages as m
from flowspec_edge.d0.request import Request, RequestHandle
from flowspec_edge.d0.run_events import SessionOpened
from flowspec_edge.drivers.processes import process_cluster
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec, Connected
from flowspec_edge.drivers.processes.subprocesses import WorkerProcesses
from flowspec_edge.drivers.ring import Addresses
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.transport import keys
from flowspec_edge.transport.codec import encode
from flowspec_edge.transport.keys import KeyPair

HTTP = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n{}\r\n"
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"
NULL = b"NULL".ljust(20, b"\0") + b"\0" * 32
# What has once ended a cluster or a worker, or cost seconds and memory.
CORPUS: list[list[bytes]] = [
    [HTTP],
    [b""],
    [b"\x93\x01"],
    [b"\x80" * 1000],
    [b"\x91" * 5000],
    [b"\xdc\x00\x3b" + (b"\xdd\x00\x01\x00\x00" + b"\x80" * 65536) * 3],
    [b"\xdd\x00\x01\x00\x00" * 500],
    [msgpack.packb(["Credit", "", [], b"", 1, 0, 2**64 - 1])],
    [msgpack.packb(["Segment", "int32", [65536], b"", 1])],
    [b"x"] * 9,
]
RAW = [HTTP, b"\x03\x00ab\x03\x00cd", bytes(range(1, 200)), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
       GREETING[:10], GREETING + NULL[:5], GREETING + NULL, GREETING + NULL + b"\x04\x19\x05READY",
       b"\xff" * 400,
       GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32 + b"\x04\xc8\x05HELLO\x01\x00" + b"\0" * 193]


def forged(rng: random.Random, session: int, stage: int, instance: str) -> m.Message:
    """A well-formed message of any type, on ``session`` or another, that no honest device sends."""
    on = rng.choice([session, session, session, 0, max(0, session - 1)])
    epoch = rng.choice([0, 0, 0, 1, 2**40])
    rows, first = rng.choice([0, 1, 3]), rng.choice([10**6, 2**31 - 4])
    numbers = np.arange(first, first + rows, dtype=np.int32)
    hidden = m.Payload("float32", np.ones((rows, 3), np.float32))
    ids = (on, epoch, rng.choice([10**6, 2**62]))
    position = rng.choice([-1, 0, 2**31 - 1])
    some: list[m.Message] = [
        m.Open(on, epoch, rng.choice([1, 2**62]), parent_session=rng.choice([-1, on]), rows=1),
        m.Close(on, rng.choice([(), (1, 2), (2**62,)])),
        m.Segment(*ids, first, 2**31, numbers, np.full(rows, position, np.int32), rng.choice([0, 2**31]),
                  np.full((rows, 2), 255, np.uint8), numbers, hidden=hidden),
        m.Segment(*ids, 0, 0, numbers, numbers, 0, np.zeros((rows, 0), np.uint8), numbers[:0],
                  tokens=numbers),
        m.Output(*ids, numbers, hidden), m.Output(on, epoch, 0, numbers, hidden),
        m.Tap(*ids, 0, numbers, hidden),
        m.Prune(on, epoch, 2**62, 0, 2**31 - 1, numbers), m.Cancel(on, epoch, (2**62,)),
        m.Credit(*ids), m.Computed(*ids, rng.choice([stage, stage + 7]), 4, 4, 0, 2**62, 0),
        m.Hello(instance, stage + 1, 2, (0, 1), "digest"),
        m.Hello(instance, stage, 2, (0, 1), "digest", newest=2**63 - 1),
        m.Heartbeat(instance, stage + 1, {"rows": 1e308}),
        m.Heartbeat(instance, stage, {"rows": float("nan"), "resident": float("inf")}),
        m.SessionReport(instance, stage, on + 5, {"bytes_out": float("inf"), "slot_s": float("nan")}),
        m.Failed(instance, stage, "forged\x1b[31m"), m.Shutdown("forged"),
    ]
    data = [message for message in some if isinstance(message, m.Segment | m.Output)]
    pair = rng.choice([(data[0], data[1]), (data[2], data[3])])
    some.append(m.Batch((pair[0], replace(pair[1], session=on + 1))))
    return rng.choice(some)


def wrong_frames(rng: random.Random, session: int, stage: int, instance: str) -> list[bytes]:
    """Frames of one message: random, from the corpus, forged, or forged and mutated."""
    kind = rng.random()
    if kind < 0.1:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 5))]
    if kind < 0.2:
        return rng.choice(CORPUS)
    frames = [bytes(frame) for frame in encode(forged(rng, session, stage, instance))]
    if kind < 0.6:
        return frames
    which = rng.randrange(len(frames))
    *_, frames[which] = mutations([frames[which]], 1, rng.randrange(2**31))
    return frames


@contextmanager
def intruder(kind: int, endpoint: str, identity: str = "", own: KeyPair | None = None,
             server: bytes = b"") -> Iterator[Callable[[Sequence[bytes]], None]]:
    """A PUSH or DEALER socket with the key ``own``, or with none; gives a function that sends."""
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        made.sndtimeo = 20_000
        if identity:
            made.routing_id = identity.encode()
        if own:
            made.curve_serverkey, made.curve_secretkey, made.curve_publickey = server, own.secret, own.public
        made.connect(endpoint)
        yield lambda frames: made.send_multipart(list(frames))


def knock(endpoints: Sequence[str], held: list[socket.socket]) -> None:
    """Every kind of raw bytes to every port; half of the connections stay open, in ``held``."""
    for endpoint in endpoints:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        for place, data in enumerate(RAW):
            raw = socket.create_connection((host, int(port)))
            with suppress(OSError):
                raw.sendall(data)
            if place % 2:
                raw.close()
            else:
                held.append(raw)


REQUEST = Request(PROMPT, "flowspec", max_new_tokens=24)
INSTANCES = ["board-1", "board-2"]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return PlainDecoder(model).generate(PROMPT, REQUEST.max_new_tokens, REQUEST.sampling)[0]


class Site:
    """A cluster of two stages whose addresses and keys are known, and a thread that serves it."""

    def __init__(self, model: Path, directory: Path, encrypted: bool) -> None:
        self.pairs = [keys.generate() for _ in range(3)] if encrypted else []
        for place, pair in enumerate(self.pairs):
            keys.save(pair, directory / f"key{place}")
        host = own_address()  # both ports are bound again later, by the cluster
        with socket.create_server((host, 0)) as a, socket.create_server((host, 0)) as b:
            self.control, self.output = (f"tcp://{host}:{s.getsockname()[1]}" for s in (a, b))
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.listen = [f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners]
        self.workers = WorkerProcesses()
        configs = []
        for place, listener in enumerate(self._listeners, start=1):
            public = [pair.public.decode() for pair in self.pairs]
            own = {"key_file": str(directory / f"key{place}"), "control_key": public[0],
                   "previous_key": public[place - 1], "next_key": public[(place + 1) % 3]} if public else {}
            configs.append(WorkerConfig.model_validate({
                "instance": INSTANCES[place - 1], "stage": place, "stages": 2, "model": str(model / "target"),
                "threads": 1, "control": self.control, "listen": self.listen[place - 1],
                "listen_fd": listener.fileno(), "next": [self.listen[1], self.output][place - 1],
                "lost_after_s": PATIENCE, "broken_after_s": 1.0, **own}))
        self.workers.start(configs)
        self.seen = Striker()
        self.session = 0
        self.seen.on_opened = self._opened
        self.addresses = Addresses(self.control, self.output, self.listen[0], INSTANCES,
                                   directory / "key0" if encrypted else None,
                                   worker_keys=[pair.public for pair in self.pairs[1:]])
        self.cluster = ProcessCluster(ClusterSpec(model, 2, threads=1, rejoin_within=PATIENCE,
                                                  observer=self.seen), Connected(self.addresses)).start()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.cluster.serve, args=[self._over.is_set], daemon=True)
        self._thread.start()

    def _opened(self, event: SessionOpened) -> None:
        self.session = event.session

    def begin(self) -> RequestHandle:
        """A request whose first tokens have come."""
        begun = threading.Event()
        handle = self.cluster.submit(REQUEST, lambda new: begun.set())
        handle.add_done_callback(lambda done: begun.set())
        assert begun.wait(PATIENCE)
        return handle

    def close(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.cluster.close()
        codes = self.workers.ended()
        self.workers.end()
        for listener in self._listeners:
            listener.close()
        assert codes == {}, "a stage's process has ended"


@contextmanager
def site(model: Path, directory: Path, encrypted: bool) -> Iterator[Site]:
    made = Site(model, directory, encrypted)
    try:
        yield made
    finally:
        made.close()


def right_or_one_error(handle: RequestHandle, expected: list[int]) -> None:
    error = handle.exception(PATIENCE)
    if error is None:
        assert handle.result().tokens == expected
    else:
        assert isinstance(error, FlowspecError), repr(error)
        assert len(str(error).splitlines()) == 1
        assert "\x1b" not in str(error)


def test_strangers_on_a_usual_clusters_ports(model: Path, expected: list[int]) -> None:
    seen, held = Striker(), list[socket.socket]()
    with ProcessCluster(ClusterSpec(model, 2, threads=1, observer=seen, rejoin_within=PATIENCE)).start() as cluster:
        running = cluster.running
        assert running is not None
        links, plan = running.links, running.plan
        assert plan is not None
        ports = [links.control_endpoint, links.output_endpoint, *plan._ring.data[1:]]
        seen.arm(3, lambda: knock(ports, held))
        assert cluster.generate(REQUEST).tokens == expected
        assert not seen.armed
        with ExitStack() as intruders:
            for endpoint in ports:
                kind = zmq.DEALER if endpoint == links.control_endpoint else zmq.PUSH
                intruders.enter_context(intruder(kind, endpoint, running.members.instances[0]))
            assert cluster.generate(REQUEST).tokens == expected
        assert seen.losses == []
    for raw in held:
        raw.close()


@pytest.mark.parametrize("count", [80, pytest.param(2500, marks=pytest.mark.soak)])
def test_strangers_on_ports_without_keys_change_nothing(
        model: Path, expected: list[int], tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The sender of a frame is unknown, so a wrong one is dropped; the log does not fill."""
    rng = random.Random(count)
    with site(model, tmp_path, encrypted=False) as made:
        held: list[socket.socket] = []
        handle = made.begin()
        knock([made.control, made.output, *made.listen], held)
        assert handle.result(PATIENCE).tokens == expected
        for endpoint, kind in ((made.output, zmq.PUSH), (made.control, zmq.DEALER)):
            with intruder(kind, endpoint, "a stranger") as send:
                handle = made.begin()
                for _ in range(count):
                    send(wrong_frames(rng, made.session, 2, INSTANCES[1]))
                assert handle.result(PATIENCE).tokens == expected
                until(lambda: made.cluster.running.links._output.dropped > count // 4)
        assert made.seen.losses == []
        assert made.seen.drops["frame"] > count // 4
        for endpoint in made.listen:
            with intruder(zmq.PUSH, endpoint) as send:
                handle = made.begin()
                for _ in range(count // 4):
                    send(wrong_frames(rng, made.session, 1, INSTANCES[0]))
                right_or_one_error(handle, expected)
            assert made.begin().result(PATIENCE).tokens == expected
        until(lambda: all(member.counters.get("dropped_frames", 0) > 0
                          for member in made.cluster.running.members._members.values()))
        for raw in held:
            raw.close()
    assert len([record for record in caplog.records if "dropped a message" in record.message]) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(2500, marks=pytest.mark.soak)])
def test_a_holder_of_a_stages_key_ends_nothing(
        model: Path, expected: list[int], tmp_path: Path, count: int) -> None:
    rng = random.Random(count)
    with site(model, tmp_path, encrypted=True) as made:
        d0, v1, v2 = made.pairs
        targets: list[tuple[int, str, str, keys.KeyPair, keys.KeyPair]] = [
            (zmq.PUSH, made.output, "", v2, d0), (zmq.DEALER, made.control, INSTANCES[0], v2, d0),
            (zmq.DEALER, made.control, INSTANCES[1], v2, d0), (zmq.PUSH, made.listen[0], "", d0, v1),
            (zmq.PUSH, made.listen[1], "", v1, v2)]
        for kind, endpoint, identity, own, server in targets if count > 100 else targets[::2]:
            with intruder(kind, endpoint, identity, own, server.public) as send:
                handle = made.begin()
                with suppress(zmq.Again):  # D0 no longer reads it once the stage has taken its identity back
                    for _ in range(count):
                        send(wrong_frames(rng, made.session, 2, INSTANCES[1]))
                right_or_one_error(handle, expected)
            deadline = time.monotonic() + PATIENCE
            while (handle := made.begin()).exception(PATIENCE):  # the intruder's last frames are still queued
                assert time.monotonic() < deadline
            assert handle.result().tokens == expected, (endpoint, identity)


def test_a_draft_device_that_counts_from_behind_is_told(
        model: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was rebooted with its clock set back and has an old Hello: the stages know a session with a
    higher number, and would take a segment that overtakes its Open for a stale one."""
    with site(model, tmp_path, encrypted=True) as made:
        assert made.begin().result(PATIENCE).tokens == expected
        before = made.session
        monkeypatch.setattr(process_cluster.time, "time", lambda: 5.0)
        made.cluster.running.core.newest_session = 0
        assert made.begin().result(PATIENCE).tokens == expected
        assert made.seen.losses
        assert made.session > before
