"""Virtual time: an event clock, and spans in which devices were busy."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["draft", "verify", "compute"]


@dataclass(frozen=True, slots=True)
class Span:
    """D0 (0) drafted or verified, or Vi (i) computed, ``rows`` rows of ``run``.

    ``run`` is -1 for a draft pass; ``cancelled``: the work was cut short at ``end``.
    """

    device: int
    kind: SpanKind
    start: float  # seconds
    end: float
    run: int
    rows: int
    cancelled: bool = False
    session: int = 0


class EventClock:
    """Runs events in order of time, then of insertion."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Run ``event`` when the clock reaches ``time`` (seconds)."""
        heapq.heappush(self._events, (time, self._count, event))
        self._count += 1

    def step(self) -> bool:
        """Run the next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True
