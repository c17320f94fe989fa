"""Readers of a run's events that several tools share: a request's timeline, and the stages' clocks.

A stage's times are on its own monotonic clock, whose origin differs on every board. ``StageClocks`` maps it: a
message has its departure time on the stage's clock, and arrives later on D0's, so the smallest difference seen
estimates the offset. The estimate is too large by the fastest message's latency, far below a segment's time:
work appears that much late, never before its cause.
"""

from __future__ import annotations

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Request, Result
from flowspec_edge.d0.run_events import RunEvent, SessionEnded, SessionEvent, SessionOpened, StagesLost
from flowspec_edge.messages import Computed


class RequestTimeline(Observer):
    """The events of one request, and the losses while it ran.

    result  None: it is running or failed, so the events are incomplete
    """

    def __init__(self, request: Request, shares_clock: bool = True) -> None:
        """Begin a request's timeline.

        ``shares_clock``: the stages share D0's clock, as on one machine and in virtual time.
        """
        self.events: list[SessionEvent | StagesLost] = []
        self.request = request
        self.shares_clock = shares_clock
        self.result: Result | None = None
        self._sessions: set[int] = set()
        self._newest = False  # whether the session opened last is the request's

    @property
    def wants_times(self) -> bool:
        return self._newest

    def observe(self, event: RunEvent) -> None:
        match event:
            case SessionOpened():
                self._newest = event.request is self.request
                if self._newest:
                    self._sessions.add(event.session)
            case SessionEnded(result=None):
                return  # with an error, or it will be opened again
            case StagesLost():
                if self.events and self.result is None:
                    self.events.append(event)
                return
        if not isinstance(event, SessionEvent) or event.session not in self._sessions:
            return
        self.events.append(event)
        if isinstance(event, SessionEnded):
            self.result = event.result
            self._sessions.clear()  # what arrives late belongs to no request


class StageClocks:
    def __init__(self, forget: float = 0.0) -> None:
        """Begin an estimate; ``forget``: seconds added to it with every message, because clocks drift."""
        self._forget = forget
        self._offset: dict[int, float] = {}  # D0's clock minus the stage's, seconds

    def learn(self, message: Computed, at: float) -> None:
        """Learn from a message that arrived ``at`` seconds of D0's clock."""
        difference = at - message.sent * 1e-6
        self._offset[message.stage] = min(difference, self._offset.get(message.stage, difference) + self._forget)

    def times(self, message: Computed) -> tuple[float, float]:
        """Return start and end of the work in seconds of D0's clock; unknown stages share that clock."""
        offset = self._offset.get(message.stage, 0.0)
        return message.start * 1e-6 + offset, message.end * 1e-6 + offset
