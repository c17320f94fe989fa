"""The timeline of requests: events of each segment, in the order in which D0 saw them.

Times are seconds on D0's clock, except in ``StageTimes``: the stage's own monotonic clock, whose origin
differs on every board. ``StageClocks`` maps it: a message has its departure time on the stage's clock, and
arrives later on D0's, so the smallest difference seen estimates the offset. The estimate is too large by
the fastest message's latency, far below a segment's time: work appears that much late, never before its
cause.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Literal, NamedTuple

from flowspec_edge.d0.jobs import Job
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Request, Result
from flowspec_edge.d0.session import DraftPass, DraftSession
from flowspec_edge.messages import Cancel, Computed, Credit, Output, Prune, Segment, Tap


class SessionOpened(NamedTuple):
    """A request begins, or continues in a new session after a loss; ``text``: tokens to prefill."""

    session: int
    at: float
    text: int


class SegmentSent(NamedTuple):
    """``numbers`` and ``positions`` are those of the segment's rows."""

    session: int
    at: float
    run: int
    numbers: tuple[int, ...]
    positions: tuple[int, ...]


class Pruned(NamedTuple):
    """Of the numbers in [start, stop), the stages keep ``kept``."""

    session: int
    at: float
    start: int
    stop: int
    kept: tuple[int, ...]


class Cancelled(NamedTuple):
    session: int
    at: float
    runs: tuple[int, ...]


class StageTimes(NamedTuple):
    session: int
    at: float
    times: Computed


class OutputArrived(NamedTuple):
    session: int
    at: float
    run: int
    rows: int


class DraftDeviceWork(NamedTuple):
    """D0 expanded ``rows`` nodes, or verified ``rows`` rows of ``run``, from ``start`` to ``at``."""

    session: int
    at: float
    kind: Literal["draft", "verify"]
    start: float
    rows: int
    run: int = -1
    tokens: tuple[int, ...] = ()  # that became text


class SessionEnded(NamedTuple):
    session: int
    at: float


class StagesLost(NamedTuple):
    """A stage was lost, and with it every open session."""

    at: float
    reason: str


TimelineEvent = (SessionOpened | SegmentSent | Pruned | Cancelled | StageTimes | OutputArrived
                 | DraftDeviceWork | SessionEnded | StagesLost)


class Timeline(Observer):
    """Appends events to ``events``: those of every session, unless a subclass narrows :meth:`follows`."""

    def __init__(self, events: MutableSequence[TimelineEvent]) -> None:
        self.events = events
        self._noted: dict[int, int] = {}  # tokens of each session's answer that are in events

    def follows(self, session: int) -> bool:
        return True

    def opened(self, draft_session: DraftSession, at: float) -> None:
        session, made = draft_session.builder.session, len(draft_session.tokens)
        if self.follows(session):
            self._noted[session] = made
            self.events.append(SessionOpened(session, at, len(draft_session.request.prompt) + made))

    def sent(self, message: Segment | Prune | Cancel, at: float) -> None:
        if not self.follows(message.session):
            return
        match message:
            case Segment():
                self.events.append(SegmentSent(message.session, at, message.run,
                                               tuple(message.numbers.tolist()),
                                               tuple(message.positions.tolist())))
            case Prune():
                self.events.append(Pruned(message.session, at, message.start, message.stop,
                                          tuple(message.keep.tolist())))
            case Cancel():
                self.events.append(Cancelled(message.session, at, message.runs))

    def arrived(self, message: Output | Credit | Tap | Computed, at: float) -> None:
        if not self.follows(message.session):
            return
        if isinstance(message, Computed):
            self.events.append(StageTimes(message.session, at, message))
        elif isinstance(message, Output):
            self.events.append(OutputArrived(message.session, at, message.run, len(message.numbers)))

    def worked(self, job: Job, start: float, end: float) -> None:
        for draft_session, task in job.parts:
            session, tokens = draft_session.builder.session, draft_session.tokens
            if not self.follows(session):
                continue
            if isinstance(task, DraftPass):
                self.events.append(DraftDeviceWork(session, end, "draft", start, len(task.request.nodes)))
                continue
            output, new = task.output, tuple(tokens[self._noted.get(session, len(tokens)):])
            self._noted[session] = len(tokens)
            self.events.append(DraftDeviceWork(session, end, "verify", start, len(output.numbers), output.run,
                                               new))

    def settled(self, draft_session: DraftSession, result: Result, at: float) -> None:
        session = draft_session.builder.session
        self._noted.pop(session, None)
        if self.follows(session):
            self.events.append(SessionEnded(session, at))

    def failed(self, draft_session: DraftSession, at: float) -> None:
        self._noted.pop(draft_session.builder.session, None)

    def lost(self, reason: str, at: float) -> None:
        self._noted.clear()
        self.events.append(StagesLost(at, reason))


class RequestTimeline(Timeline):
    """The events of one request; ``result`` None: it is running or failed, so the events are incomplete."""

    def __init__(self, request: Request, one_clock: bool = True) -> None:
        """``one_clock``: the stages share D0's clock, as on one machine and in virtual time."""
        super().__init__([])
        self.request = request
        self.one_clock = one_clock
        self.result: Result | None = None
        self._sessions: set[int] = set()
        self._newest = False  # whether the session opened last is the request's

    @property
    def wants_times(self) -> bool:
        return self._newest

    def follows(self, session: int) -> bool:
        return session in self._sessions

    def opened(self, draft_session: DraftSession, at: float) -> None:
        self._newest = draft_session.request is self.request
        if self._newest:
            self._sessions.add(draft_session.builder.session)
        super().opened(draft_session, at)

    def settled(self, draft_session: DraftSession, result: Result, at: float) -> None:
        super().settled(draft_session, result, at)
        if self.follows(draft_session.builder.session):
            self.result = result
            self._sessions.clear()  # what arrives late belongs to no request

    def lost(self, reason: str, at: float) -> None:
        if self.events and self.result is None:
            super().lost(reason, at)


class AcceptanceTracker:
    """Counts the draft tokens accepted in each round, by session."""

    def __init__(self) -> None:
        # By session: rounds ended, -1 before the first token, and tokens at the newest round's end.
        self._rounds: dict[int, tuple[int, int]] = {}

    def begin(self, draft_session: DraftSession) -> None:
        self._rounds[draft_session.builder.session] = (-1, len(draft_session.tokens))

    def verified(self, draft_session: DraftSession) -> int | None:
        """Return the draft tokens accepted in the round that this verification ended; None if it ended
        none, or the whole text: that round has no miss."""
        session, tokens = draft_session.builder.session, len(draft_session.tokens)
        rounds, before = self._rounds.get(session, (0, tokens))
        now = draft_session.strategy.counters.rounds
        if tokens == before or now <= rounds:
            return None
        self._rounds[session] = (now, tokens)
        return None if rounds < 0 or draft_session.finished else tokens - before - 1  # the last was the miss

    def end(self, session: int) -> None:
        self._rounds.pop(session, None)

    def clear(self) -> None:
        self._rounds.clear()


class StageClocks:
    def __init__(self, forget: float = 0.0) -> None:
        """``forget``: seconds added to the estimate with every message, because clocks drift."""
        self._forget = forget
        self._offset: dict[int, float] = {}  # D0's clock minus the stage's, seconds

    def learn(self, message: Computed, at: float) -> None:
        """A message arrived ``at`` seconds of D0's clock."""
        seen = at - message.sent * 1e-6
        self._offset[message.stage] = min(seen, self._offset.get(message.stage, seen) + self._forget)

    def times(self, message: Computed) -> tuple[float, float]:
        """Return start and end of the work in seconds of D0's clock; unknown stages share that clock."""
        offset = self._offset.get(message.stage, 0.0)
        return message.start * 1e-6 + offset, message.end * 1e-6 + offset
