"""Readers of a run's events, called synchronously in the thread that drives the cluster.

Every call delays the requests, so an observer only takes notes. If one raises, :class:`Observers` logs the
error, and the requests go on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flowspec_edge.d0.run_events import RunEvent

log = logging.getLogger(__name__)


class Observer:
    """Base class that ignores everything."""

    @property
    def wants_times(self) -> bool:
        """Whether the stages have to report each segment's times (StageTimes), in requests that begin now."""
        return False

    def observe(self, event: RunEvent) -> None:
        """Take note of what happened."""


class Observers(Observer):
    """Several observers as one; an error affects nothing else, and is logged once per kind of event."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._failed: set[tuple[Observer, type]] = set()

    @property
    def wants_times(self) -> bool:
        return any(observer.wants_times for observer in self._observers)

    def observe(self, event: RunEvent) -> None:
        for observer in self._observers:
            try:
                observer.observe(event)
            except Exception:
                if (observer, type(event)) not in self._failed:
                    self._failed.add((observer, type(event)))
                    log.exception("a fault of this program: what is shown of the requests may be wrong (%s)",
                                  type(observer).__name__)
