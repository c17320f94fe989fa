"""For the tests of lost stages: an action at a counted event, and a record of the losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.run_events import (
    MessagesDropped,
    OutputArrived,
    RunEvent,
    SegmentSent,
    SessionOpened,
    StagesBack,
    StagesLost,
    StagesMissing,
)


class Striker(Observer):
    """Acts once, when so many segments have been sent and outputs have come since it was armed.

    losses    what was told of losses
    missed      the stages that were told to be missing, at every change
    times_back  how often that all are back
    drops       messages that D0 dropped, by reason
    on_lost     called with the next loss, once
    on_opened   called whenever a request begins, or begins again
    """

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.missed: list[list[int]] = []
        self.times_back = 0
        self.drops: Counter[str] = Counter()
        self.on_lost: Callable[[], None] | None = None
        self.on_opened: Callable[[SessionOpened], None] = lambda event: None
        self._left = 0
        self._act: Callable[[], None] | None = None

    def arm(self, events: int, act: Callable[[], None]) -> None:
        self._left, self._act = events, act

    @property
    def armed(self) -> bool:
        return self._act is not None

    def observe(self, event: RunEvent) -> None:
        match event:
            case SegmentSent() | OutputArrived():
                self._count()
            case MessagesDropped():
                self.drops[event.reason] += event.number
            case SessionOpened():
                self.on_opened(event)
            case StagesLost():
                self.losses.append(event.reason)
                if self.on_lost is not None:
                    act, self.on_lost = self.on_lost, None
                    act()
            case StagesMissing():
                self.missed.append([*event.stages])
            case StagesBack():
                self.times_back += 1

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0 and self._act is not None:
            act, self._act = self._act, None
            act()
