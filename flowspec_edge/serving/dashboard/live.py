"""GET /live: the cluster's activity as server-sent events (fields: docs/reference/metrics.md).

Events are made in the event loop's thread, once for all viewers, and only if there are any.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from flowspec_edge.d0.counters import HeartbeatCounters
from flowspec_edge.serving import sse
from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.dashboard.feed import Feed, FlowEvents, TreeEvents
from flowspec_edge.strategies.registry import title_of

log = logging.getLogger(__name__)

_TICK_S = 0.1
_SLOW_TICKS = 10  # between two events of boards and of figures
_STATES = ("cluster", "boards", "figures")  # events that replace older ones of their kind
_MAX_FAULTS = 20  # different ones
_MAX_WAITING = 64  # events for a viewer; about six seconds of them


@dataclass(frozen=True)
class Description:
    """What does not change while the server runs.

    layers   of each stage, [lo, hi)
    profile  emulated devices; None: real ones
    chat     whether the model has a chat template
    tree     whether the strategy has a draft tree
    strategies   that a request may name
    context      tokens of a prompt and its answer together, at most
    """

    model: str
    strategy: str
    dtype: str
    layers: Sequence[tuple[int, int]]
    profile: str | None = None
    needs_key: bool = False
    chat: bool = False
    tree: bool = True
    strategies: Sequence[str] = ()
    context: int | None = None

    def event(self, state: str, reason: str | None, losses: Callable[[int], dict[str, Any]]
              ) -> dict[str, Any]:
        """Return the ``cluster`` event; ``state``: "starting", "up" or "lost"; ``losses``: of a place."""
        boards = [{"place": rank, "name": f"V{rank}" if rank else "D0", "layers": layers, **losses(rank)}
                  for rank, layers in enumerate([None, *self.layers])]
        return {"model": self.model, "strategy": self.strategy, "stages": len(self.layers),
                "dtype": self.dtype, "profile": self.profile, "needs_key": self.needs_key, "chat": self.chat,
                "tree": self.tree, "strategies": [*self.strategies],
                "titles": {name: title_of(name) for name in (self.strategy, *self.strategies)},
                "context": self.context, "boards": boards, "state": state, "reason": reason}


class Viewer:
    """A bounded queue of encoded events, in which a slow viewer loses old events. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._some = asyncio.Event()

    def put(self, name: str, data: bytes) -> None:
        if name in _STATES:
            self._waiting = deque(item for item in self._waiting if item[0] != name)
        self._waiting.append((name, data))
        if len(self._waiting) > _MAX_WAITING:
            oldest = next(i for i, item in enumerate(self._waiting) if item[0] not in _STATES)
            del self._waiting[oldest]
        self._some.set()

    async def take(self) -> bytes:
        """Wait for an event, until cancelled; return all queued ones, concatenated."""
        await self._some.wait()
        self._some.clear()
        data = b"".join(data for _, data in self._waiting)
        self._waiting.clear()
        return data


class Live:
    """The endpoint, an ASGI application."""

    def __init__(self, feed: Feed, admission: Admission, description: Description,
                 decode: Callable[[Sequence[int]], str],
                 system_stats: Callable[[], HeartbeatCounters]) -> None:
        """Set up the page's events; ``decode``: the text of token ids; ``system_stats``: ``SystemStats.read`` of D0."""
        self._feed, self._admission, self._description = feed, admission, description
        self._system_stats = system_stats
        self._trees = TreeEvents(decode)
        self._flow = FlowEvents()
        self._viewers: set[Viewer] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._cluster: dict[str, Any] = {}
        self._changes = 0
        self._faults: set[str] = set()  # logged already

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the viewer has disconnected or the server ends."""
        viewer = Viewer()
        disconnection = asyncio.ensure_future(sse.disconnected(receive))
        try:
            self._add_viewer(viewer)
            await sse.begin(send)
            while not disconnection.done() and self._ticker and not self._ticker.done():
                coming = asyncio.ensure_future(viewer.take())
                either: set[asyncio.Future[Any]] = {coming, disconnection, self._ticker}
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if coming.done():
                        await sse.send_data(send, coming.result())
                finally:
                    coming.cancel()
            await send({"type": "http.response.body", "body": b""})
        finally:
            disconnection.cancel()
            self._remove_viewer(viewer)

    def _add_viewer(self, viewer: Viewer) -> None:
        """Add a viewer, and send it the present state. If a source fails, the events of the others come."""
        now = time.monotonic()
        if not self._viewers:
            self._feed.take_flow()  # what the last viewer left
            self._feed.take_trees()
            self._trees.forget()
            self._flow = FlowEvents()
            self._feed.watched = True
            self._ticker = asyncio.ensure_future(self._tick())
        with self._guard():
            self._send_cluster()
        self._viewers.add(viewer)
        viewer.put("cluster", encoded("cluster", self._cluster))
        with self._guard():
            viewer.put("boards", encoded("boards", self._boards_event(now)))
        with self._guard():
            viewer.put("figures", encoded("figures", self._stats_event()))

    def _remove_viewer(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._ticker:
            self._feed.watched = False
            self._ticker.cancel()
            self._ticker = None

    async def _tick(self) -> None:
        tick = 0
        while not self._admission.closed:
            await asyncio.sleep(_TICK_S)  # viewers get news at this interval, however often there is some
            tick += 1
            self._send_news(slow=tick % _SLOW_TICKS == 0)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Log a failure once, and go on without the events that it stopped."""
        try:
            yield
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if fault not in self._faults and len(self._faults) < _MAX_FAULTS:
                self._faults.add(fault)
                log.exception("a fault of this program: the live page lacks some events")

    def _send_news(self, slow: bool) -> None:
        """Send what is new; ``slow``: also the events that come once a second."""
        now = time.monotonic()
        with self._guard():
            self._send_cluster()
        with self._guard():
            flow = [flow_event for event in self._feed.take_flow() if (flow_event := self._flow.event(event))]
            if flow:
                self._send("flow", {"at": now, "events": flow})
        with self._guard():
            for snapshot in self._feed.take_trees():
                self._send("tree", self._trees.event(snapshot))
        changes = self._feed.stats.changes
        if slow:
            with self._guard():
                self._send("boards", self._boards_event(now))
        if slow or changes != self._changes:
            self._changes = changes
            with self._guard():
                self._send("figures", self._stats_event())

    def _send(self, name: str, event: dict[str, Any]) -> None:
        data = encoded(name, event)
        for viewer in self._viewers:
            viewer.put(name, data)

    def _send_cluster(self) -> None:
        event = self._cluster_event()
        if event != self._cluster:
            self._cluster = event
            self._send("cluster", event)

    def _cluster_event(self) -> dict[str, Any]:
        ready = self._admission.readiness()
        reason = self._feed.loss_reason or (None if ready.ready else ready.reason)
        state = "up" if reason is None else "starting" if ready.token_age_s is None else "lost"
        return self._description.event(state, reason, self._feed.boards.losses)

    def _boards_event(self, now: float) -> dict[str, Any]:
        self._feed.boards.sample(self._system_stats(), now)
        return self._feed.boards.event(now)

    def _stats_event(self) -> dict[str, Any]:
        return self._feed.stats.event(self._admission.waiting(), time.monotonic())


def encoded(name: str, event: dict[str, Any]) -> bytes:
    """Encode a server-sent event; NumPy numbers become JSON numbers."""
    return f"event: {name}\ndata: {json.dumps(event, ensure_ascii=False, default=float)}\n\n".encode()
