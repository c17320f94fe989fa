"""GET /live: what the cluster does, as server-sent events, for whoever watches.

Knows which event is due when.  Does not know what the page makes of them.  Everything is made here, in
the event loop's thread, once for all viewers, and only while there is one.  Fields: docs/serving.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from flowspec_edge.runtime.heartbeats import Counters
from flowspec_edge.serving import event_streams
from flowspec_edge.serving.desk import Desk
from flowspec_edge.serving.feed import Feed
from flowspec_edge.serving.snapshots import TreeEvents
from flowspec_edge.serving.viewers import Viewer, encoded

_TICK_S = 0.1
_SLOW_TICKS = 10  # boards and figures


@dataclass(frozen=True)
class Description:
    """What does not change while the server runs.

    layers   of each stage, [lo, hi); None: a slice of all
    profile  whose time the devices take, None: their own
    chat     whether the model takes chats
    tree     whether the strategy has a draft tree
    """

    model: str
    strategy: str
    dtype: str
    layers: Sequence[tuple[int, int] | None]
    profile: str | None = None
    needs_key: bool = False
    chat: bool = False
    tree: bool = True

    def event(self, state: str, reason: str | None) -> dict[str, Any]:
        """``cluster``; state: "starting", "up" or "lost", the reason if it is not up."""
        boards = [{"place": place, "name": f"V{place}" if place else "D0", "layers": layers}
                  for place, layers in enumerate([None, *self.layers])]
        return {"model": self.model, "strategy": self.strategy, "stages": len(self.layers),
                "dtype": self.dtype, "profile": self.profile, "needs_key": self.needs_key, "chat": self.chat,
                "tree": self.tree, "boards": boards, "state": state, "reason": reason}


class Live:
    """The endpoint; an ASGI application for any number of viewers."""

    def __init__(self, feed: Feed, desk: Desk, description: Description,
                 decode: Callable[[Sequence[int]], str], vitals: Callable[[], Counters]) -> None:
        """``decode``: the text of token ids; ``vitals``: how this machine is, see ``boards.VITALS``."""
        self._feed, self._desk, self._description = feed, desk, description
        self._vitals = vitals
        self._trees = TreeEvents(decode)
        self._viewers: set[Viewer] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._cluster: bytes = b""
        self._ends = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the viewer has gone or the server ends."""
        viewer = self._welcome()
        gone = asyncio.ensure_future(event_streams.gone(receive))
        try:
            await event_streams.begin(send)
            while not gone.done() and self._ticker and not self._ticker.done():
                coming = asyncio.ensure_future(viewer.take())
                either: set[asyncio.Future[Any]] = {coming, gone, self._ticker}
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if coming.done():
                        await send({"type": "http.response.body", "body": coming.result(), "more_body": True})
                finally:
                    coming.cancel()
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self._dismiss(viewer)

    def _welcome(self) -> Viewer:
        viewer, now = Viewer(), time.monotonic()
        if not self._viewers:
            self._feed.take_flow()  # what the last viewer left
            self._feed.take_trees()
            self._trees.forget()
            self._feed.watched = True
            self._ticker = asyncio.ensure_future(self._tick())
        self._tell_cluster()
        self._viewers.add(viewer)
        viewer.put("cluster", self._cluster)
        viewer.put("boards", encoded("boards", self._look(now)))
        viewer.put("figures", encoded("figures", self._figures()))
        return viewer

    def _dismiss(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._ticker:
            self._feed.watched = False
            self._ticker.cancel()
            self._ticker = None

    async def _tick(self) -> None:
        """Ends with the server."""
        tick = 0
        while not self._desk.closed:
            await asyncio.sleep(_TICK_S)  # the pace of the events themselves
            tick, now = tick + 1, time.monotonic()
            self._tell_cluster()
            if flow := self._feed.take_flow():
                self._tell("flow", {"at": now, "events": flow})
            for snapshot in self._feed.take_trees():
                self._tell("tree", self._trees.event(snapshot))
            ends = self._feed.figures.ends
            if tick % _SLOW_TICKS == 0:
                self._tell("boards", self._look(now))
            if tick % _SLOW_TICKS == 0 or ends != self._ends:
                self._ends = ends
                self._tell("figures", self._figures())

    def _tell(self, name: str, event: dict[str, Any]) -> None:
        data = encoded(name, event)
        for viewer in self._viewers:
            viewer.put(name, data)

    def _tell_cluster(self) -> None:
        """If it has changed."""
        data = encoded("cluster", self._describe())
        if data != self._cluster:
            self._cluster = data
            for viewer in self._viewers:
                viewer.put("cluster", data)

    def _describe(self) -> dict[str, Any]:
        ready = self._desk.readiness()
        reason = self._feed.lost_why or (None if ready.ready else ready.reason)
        if reason is None:
            return self._description.event("up", None)
        return self._description.event("starting" if ready.token_age_s is None else "lost", reason)

    def _look(self, now: float) -> dict[str, Any]:
        self._feed.boards.looked(self._vitals(), now)
        return self._feed.boards.event(now)

    def _figures(self) -> dict[str, Any]:
        return self._feed.figures.event(self._desk.readiness().waiting)
