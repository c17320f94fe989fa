"""Who watches a cluster at work: told what happens, as it happens, in the thread that drives it.

Knows the moments that are told.  Does not know what is made of them (a trace, metrics, a live page).
Every call delays the requests, so an observer notes and returns.

An observer that raises ends whatever runs, for all to see: a trace with holes is worse than none.  Behind
:class:`Observers`, as a server has them, it ends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from flowspec_edge.messages import Cancel, Computed, Credit, Heartbeat, Output, Prune, Segment, Tap
from flowspec_edge.runtime.coordinator import Coordinator
from flowspec_edge.runtime.request import Result
from flowspec_edge.runtime.sessions import Job

log = logging.getLogger(__name__)


class Observer:
    """Watches nothing; to be overridden.  Moments (``at``) are seconds: of time.monotonic(), or virtual."""

    @property
    def wants_times(self) -> bool:
        """Whether the stages are to tell of each segment (Computed), in requests that begin now."""
        return False

    def opened(self, coordinator: Coordinator, at: float) -> None:
        """A request begins, or begins again after a loss, in a session of its own."""

    def sent(self, message: Segment | Prune | Cancel, at: float) -> None:
        """D0 sends this."""

    def arrived(self, message: Output | Credit | Tap | Computed, at: float) -> None:
        """D0 takes this out of its links; it may be stale."""

    def worked(self, job: Job, start: float, end: float) -> None:
        """D0 drafted, or verified; the coordinator has decided on what came of it."""

    def settled(self, coordinator: Coordinator, result: Result, at: float) -> None:
        """A request is over, and answered."""

    def failed(self, coordinator: Coordinator, at: float) -> None:
        """A request that was opened ends with an error instead."""

    def heard(self, beat: Heartbeat, at: float) -> None:
        """A stage tells how it is."""

    def lost(self, reason: str, at: float) -> None:
        """The stages cannot go on; ``reason`` names the one that is to blame.  They are waited for, or it is
        the end of the cluster."""

    def back(self, at: float) -> None:
        """All stages are there again, or others in their place."""


class Observers(Observer):
    """Several as one.  What one of them raises neither ends a request nor is kept from the others; it is
    logged, the first time that the same moment makes it raise."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._failed: set[tuple[Observer, str]] = set()

    @property
    def wants_times(self) -> bool:
        return any(observer.wants_times for observer in self._observers)

    def opened(self, coordinator: Coordinator, at: float) -> None:
        self._tell("opened", lambda observer: observer.opened(coordinator, at))

    def sent(self, message: Segment | Prune | Cancel, at: float) -> None:
        self._tell("sent", lambda observer: observer.sent(message, at))

    def arrived(self, message: Output | Credit | Tap | Computed, at: float) -> None:
        self._tell("arrived", lambda observer: observer.arrived(message, at))

    def worked(self, job: Job, start: float, end: float) -> None:
        self._tell("worked", lambda observer: observer.worked(job, start, end))

    def settled(self, coordinator: Coordinator, result: Result, at: float) -> None:
        self._tell("settled", lambda observer: observer.settled(coordinator, result, at))

    def failed(self, coordinator: Coordinator, at: float) -> None:
        self._tell("failed", lambda observer: observer.failed(coordinator, at))

    def heard(self, beat: Heartbeat, at: float) -> None:
        self._tell("heard", lambda observer: observer.heard(beat, at))

    def lost(self, reason: str, at: float) -> None:
        self._tell("lost", lambda observer: observer.lost(reason, at))

    def back(self, at: float) -> None:
        self._tell("back", lambda observer: observer.back(at))

    def _tell(self, moment: str, tell: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                if (observer, moment) not in self._failed:
                    self._failed.add((observer, moment))
                    log.exception("a fault of this program: what is shown of the requests may be wrong (%s)",
                                  type(observer).__name__)
