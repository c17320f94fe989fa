"""Observers of a cluster's events, called synchronously in the thread that drives it.

Every call delays the requests, so an observer only takes notes. If one raises, :class:`Observers` logs the
error, and the requests go on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partialmethod
from inspect import isfunction
from typing import Literal

from flowspec_edge.d0.jobs import Job
from flowspec_edge.d0.request import Result
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.messages import Cancel, Computed, Credit, Heartbeat, Output, Prune, Segment, Tap

# no open session of that number; sent before, or out of its epoch; no message that the protocol allows
DropReason = Literal["session", "stale", "frame"]

log = logging.getLogger(__name__)


class Observer:
    """Base class that ignores everything. Times (``at``) are seconds of time.monotonic(), or virtual."""

    @property
    def wants_times(self) -> bool:
        """Whether the stages have to report each segment's times (Computed), in requests that begin now."""
        return False

    def drafter_loaded(self, graph_sizes: int) -> None:
        """D0 has loaded a draft model, whose passes of so many numbers of rows run as CUDA graphs."""

    def opened(self, draft_session: DraftSession, at: float) -> None:
        """A request begins, or continues, in a new session."""

    def sent(self, message: Segment | Prune | Cancel, at: float) -> None:
        ...

    def arrived(self, message: Output | Credit | Tap | Computed, at: float) -> None:
        """D0 reads a message from its links; it may be stale."""

    def dropped(self, reason: DropReason, count: int) -> None:
        """D0 drops so many messages."""

    def worked(self, job: Job, start: float, end: float) -> None:
        """D0 drafted or verified; the draft session has processed the result."""

    def settled(self, draft_session: DraftSession, result: Result, at: float) -> None:
        """A request is answered."""

    def failed(self, draft_session: DraftSession, at: float) -> None:
        """An opened request ends with an error instead, or gives way to others and will be opened again."""

    def heartbeat(self, beat: Heartbeat, at: float) -> None:
        ...

    def lost(self, reason: str, at: float) -> None:
        """A stage is lost; the cluster waits for it, or ends."""

    def missing(self, stages: Sequence[int], at: float) -> None:
        """During a recovery: the stages that are lost and not back yet, V1 is 1; at each change."""

    def recovered(self, at: float) -> None:
        """All stages, or their replacements, are back."""


class Observers(Observer):
    """Several observers as one; an error affects nothing else, and is logged once per kind of event.

    Every method of :class:`Observer` is defined below as a call of the same method of each observer.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._failed: set[tuple[Observer, str]] = set()

    @property
    def wants_times(self) -> bool:
        return any(observer.wants_times for observer in self._observers)

    def _notify(self, event: str, *details: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, event)(*details)
            except Exception:
                if (observer, event) not in self._failed:
                    self._failed.add((observer, event))
                    log.exception("a fault of this program: what is shown of the requests may be wrong (%s)",
                                  type(observer).__name__)


for _event in [name for name, method in vars(Observer).items() if isfunction(method)]:
    setattr(Observers, _event, partialmethod(Observers._notify, _event))
