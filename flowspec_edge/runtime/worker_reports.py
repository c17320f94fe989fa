"""What a stage tells D0 of itself, over the control channel: Hello, heartbeats, a segment's times, failures.

Knows what each report says and when the next heartbeat is due.  Nothing here is waited for: a report that
D0 has no room for is dropped.  Does not know what a stage does between reports.
"""

from __future__ import annotations

import time

from flowspec_edge.messages import Computed, Failed, Heartbeat, Hello, Segment
from flowspec_edge.runtime.engine import Engine
from flowspec_edge.runtime.vitals import Vitals
from flowspec_edge.runtime.worker_books import Books
from flowspec_edge.runtime.workerconfig import WorkerConfig
from flowspec_edge.transport.base import ClientLink


class Reports:
    """One stage's, for as long as its process lives.

    due_at  when the next heartbeat is to leave, in seconds of time.monotonic()
    """

    def __init__(self, config: WorkerConfig, control: ClientLink, following: ClientLink, engine: Engine,
                 books: Books, hello: Hello) -> None:
        """``control``: to D0; ``following``: to the next device."""
        self._config = config
        self._control = control
        self._following = following
        self._engine = engine
        self._books = books
        self._hello = hello
        self._vitals = Vitals()
        self._greeted = 0  # breaks of the control link that D0 has been greeted after
        self.due_at = 0.0

    def greet(self) -> None:
        """Hello."""
        breaks = self._control.breaks()
        if self._control.send(self._hello):  # else the queue is full of old heartbeats: once more
            self._greeted = breaks

    def greet_again(self) -> None:
        """Hello, if D0 is back, or another one."""
        if self._control.breaks() > self._greeted and not self._control.lost_for():
            self.greet()

    def beat(self) -> None:
        """A heartbeat on all sessions together and on the board; the next one says it all, too.

        ``apart_s`` is there while the next device is out of reach, and says since when.
        """
        self.due_at = time.monotonic() + self._config.heartbeat_s
        counters = {**self._engine.counters, **self._books.total.counters(), "since": self._books.since,
                    "cache_bytes": self._engine.cache_bytes, **self._vitals.read()}
        if apart := self._following.lost_for():
            counters["apart_s"] = apart
        self._send(counters)

    def last_beat(self, session: int) -> None:
        """The heartbeat on a session that ends, and on it alone."""
        own = self._books.shares(session)[-1]
        self._send({**self._engine.counters_of(session), **own.counters(), "closed": session})

    def computed(self, segment: Segment, rows: int, start: float, end: float) -> None:
        """How long ``rows`` of a segment took, if D0 wants to know; seconds of time.monotonic()."""
        if self._books.timed(segment.session):
            times = (round(moment * 1e6) for moment in (start, end, time.monotonic()))
            self._control.send(Computed(segment.session, segment.epoch, segment.run, self._config.stage,
                                        rows, *times))

    def failed(self, reason: str) -> None:
        """The open sessions cannot go on."""
        self._control.send(Failed(self._config.instance, self._config.stage, reason))

    def _send(self, counters: dict[str, float]) -> None:
        self._control.send(Heartbeat(self._config.instance, self._config.stage, counters))
