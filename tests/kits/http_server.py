"""What the tests of the endpoint share: a server with real sockets, and a cluster that can be held."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import (
    ClusterState,
    ClusterStatus,
    OnTokens,
    Request,
    RequestHandle,
    Result,
)
from flowspec_edge.d0.request_queue import RequestQueue, SharedCluster
from flowspec_edge.d0.run_events import RunEvent, SegmentSent, SessionEnded
from flowspec_edge.model.grammar import one_of
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.serving.access_log import AccessRecord, requests
from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.app import make_app
from flowspec_edge.serving.dashboard.live import Live
from flowspec_edge.serving.metrics import Metrics
from flowspec_edge.serving.openai.handler import KEEP_ALIVE_S
from flowspec_edge.serving.openai.prepare import ServedModel
from flowspec_edge.serving.server import listen, listening, url_of
from flowspec_edge.strategies.params import Params
from kits.process_clusters import PATIENCE, until

NAME = "tiny"
AT_ONCE = 4  # requests that the cluster has room for
LONG = 1500  # tokens: with a model that never_ends, more than come while a test looks on
STRATEGIES = ("flowspec", "chunk_pp", "autoregressive")


class Held:
    """A real cluster that starts probes, and hands on tokens, only while it may.

    While a piece is held nothing goes on for anybody: the thread that serves is in its callback.
    """

    clock = "wall"

    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster
        self.may_start, self.may_go = threading.Event(), threading.Event()
        self.may_start.set()
        self.may_go.set()
        self.on_piece: Callable[[], None] = lambda: None  # called with every piece
        self.broken: Exception | None = None  # raised by a probe, and by a request's first piece
        self.ends: list[Result | BaseException] = []
        self._lost: str | None = None
        self._pieces: dict[RequestHandle, int] = {}  # of those that were enqueued, and the probes

    @property
    def status(self) -> ClusterStatus:
        return ClusterStatus(ClusterState.RECOVERING, self.lost) if self.lost else self._cluster.status

    @property
    def lost(self) -> str | None:
        """What the cluster says that it has lost, and waits for; then no request begins."""
        return self._lost

    @lost.setter
    def lost(self, lost: str | None) -> None:
        self._lost, self.queue.paused = lost, lost is not None

    @property
    def queue(self) -> RequestQueue:
        return self._cluster.queue

    @property
    def started(self) -> list[Request]:
        """In the order in which they got their first places."""
        return [handle.request for handle in self._placed()]

    def _placed(self) -> list[RequestHandle]:
        return sorted((handle for handle in [*self._pieces] if handle.placed_at is not None),
                      key=lambda handle: handle.placed_at or 0.0)

    @property
    def pieces(self) -> int:
        """How many came of the request that was started last."""
        return self._pieces[self._placed()[-1]]

    def forget(self) -> None:
        """Drop the requests so far."""
        self._pieces.clear()

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        return self._cluster.submit(request, on_tokens)

    def probe(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        assert self.may_start.wait(PATIENCE)
        if self.broken:
            raise self.broken
        handle = self._cluster.probe(request, on_tokens)
        self._watch(handle)
        return handle

    def enqueue(self, handle: RequestHandle) -> None:
        self._watch(handle)
        self._cluster.enqueue(handle)

    def _watch(self, handle: RequestHandle) -> None:
        on_tokens = handle.on_tokens

        def hold(tokens: list[int]) -> None:
            if self.broken and not self._pieces.get(handle):
                raise self.broken
            self._pieces[handle] = self._pieces.get(handle, 0) + 1
            self.on_piece()
            if on_tokens:
                on_tokens(tokens)
            assert self.may_go.wait(PATIENCE)

        handle.on_tokens = hold
        handle.add_done_callback(
            lambda handle: self.ends.append(handle.exception() or handle.result()))
        self._pieces[handle] = 0

    def serve(self, stop: Callable[[], bool]) -> None:
        self._cluster.serve(stop)

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        return self._cluster.generate(request, on_tokens)

    def close(self) -> None:
        self._cluster.close()


class Says(Held):
    """Its requests' answers are ``text``, as far as their limits go; without one they are the model's own."""

    def __init__(self, cluster: SharedCluster, tokenizer: Tokenizer) -> None:
        super().__init__(cluster)
        self.text: str | None = None
        self._grammars = tokenizer.grammars

    def enqueue(self, handle: RequestHandle) -> None:
        if self.text is not None:
            rule = one_of([self.text])
            text = self._grammars.text(lambda _: f"start: {rule}")
            grammar = self._grammars.compile(text, handle.request.stop_ids)
            handle.request = replace(handle.request, grammar=grammar)
        super().enqueue(handle)


class Watch(Observer):
    """Counts segments, and holds the cluster as soon as one of a new session is sent, if told to."""

    def __init__(self) -> None:
        self.segments: Counter[int] = Counter()  # that were sent, by session
        self.closed: set[int] = set()  # sessions on which every stage has reported
        self.may_send, self.holds = threading.Event(), threading.Event()
        self.may_send.set()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """The next segment that is sent, of whatever session, is the last one until the end of this."""
        self.holds.clear()
        self.may_send.clear()
        try:
            yield
        finally:
            self.may_send.set()

    def observe(self, event: RunEvent) -> None:
        match event:
            case SegmentSent():
                self.segments[event.session] += 1
                if not self.may_send.is_set():
                    self.holds.set()
                    assert self.may_send.wait(PATIENCE)
            case SessionEnded(result=Result()):
                self.closed.add(event.session)


class Records(logging.Handler):
    """The lines of finished requests."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[AccessRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.record)  # type: ignore[attr-defined]

    def wait(self, status: int) -> AccessRecord:
        """The newest with this status, once there is one."""
        until(lambda: any(record.status == status for record in self.seen))
        return next(record for record in reversed(self.seen) if record.status == status)


@dataclass
class Running:
    """A server on this machine; ``client`` does not try again."""

    url: str
    admission: Admission
    client: OpenAI
    http: httpx2.Client
    records: Records
    connections: list[socket.socket] = field(default_factory=list)  # that are closed at the end

    def ready(self) -> tuple[int, str]:
        """/ready's status and reason."""
        answer = self.http.get("/ready")
        return answer.status_code, answer.json()["reason"] or ""


def served(model: Path, template: str | None = "vicuna", strategy: str = "flowspec") -> ServedModel:
    """``template``: a name, a file, or the text of one."""
    if template and "{" in template:
        file = model.parent / f"{hashlib.sha256(template.encode()).hexdigest()}.jinja"
        file.write_text(template)
        template = str(file)
    found = OpenModel(model)
    return ServedModel(found, Tokenizer(found, template), NAME, strategy, STRATEGIES, Params(), 24)


@contextmanager
def running(what: ServedModel, cluster: SharedCluster, capacity: int = 16, api_key: str | None = None,
            recent_s: float = 60.0, patience_s: float = 60.0, at_once: int = 1,
            keep_alive_s: float = KEEP_ALIVE_S, metrics: Metrics | None = None,
            page: Callable[[Admission], Live] | None = None, port: int = 0,
            cors_origins: Sequence[str] = ()) -> Iterator[Running]:
    """The server, ready; as ``flowspec serve`` runs it, but for the main thread."""
    admission = Admission(what.probe(), capacity, recent_s, patience_s, at_once)
    listener = listen("127.0.0.1", port, api_key)
    url = url_of(listener)
    ready, records = threading.Event(), Records()
    owner = threading.Thread(target=admission.run, args=(cluster, ready.set))
    requests.addHandler(records)
    level = requests.level
    requests.setLevel(logging.INFO)
    try:
        with (OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0) as client,
              httpx2.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http,
              listening(listener, make_app(admission, what, api_key, keep_alive_s, metrics,
                                           page(admission) if page else None, cors_origins), admission)):
            owner.start()
            assert ready.wait(PATIENCE)
            it = Running(url, admission, client, http, records)
            try:
                yield it
            finally:
                for connection in it.connections:
                    connection.close()
    finally:
        requests.removeHandler(records)
        requests.setLevel(level)
        if isinstance(cluster, Held):
            cluster.may_start.set()
            cluster.may_go.set()
        owner.join(PATIENCE)
    assert not owner.is_alive()


def ask(server: Running, prompt: Any, **how: Any) -> Any:
    return server.client.completions.create(**{"model": NAME, "prompt": prompt, "max_tokens": 6, **how})


def placed(server: Running) -> tuple[int, int]:
    """How many requests run, and how many wait."""
    state = server.admission.readiness()
    return state.running, state.waiting


def read_until(connection: socket.socket, awaited: bytes, times: int = 1) -> bytes:
    """What comes, up to and with ``awaited``."""
    data = b""
    while data.count(awaited) < times:
        more = connection.recv(4096)
        assert more, data
        data += more
    return data


def post(server: Running, body: dict[str, Any], address: str = "127.0.0.1") -> socket.socket:
    """Send a request from an address, and leave the answer to come."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({"model": NAME, **body}).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n")
    connection = socket.create_connection((host, int(port)), PATIENCE, (address, 0))
    server.connections.append(connection)
    connection.sendall(head.encode() + data)
    return connection
