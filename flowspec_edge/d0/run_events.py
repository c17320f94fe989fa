"""The list of a run's events: what happened to its sessions, its stages and D0, in the order D0 saw it.

The core and the drivers emit them (``observer``). Traces, metrics, the page and statistics read them, and
count nothing that an event says.

Times (``at``) are seconds on D0's clock, time.monotonic() or virtual, except in ``StageTimes``: those are on
the stage's own monotonic clock, whose origin differs on every board.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Literal, NamedTuple

from flowspec_edge.d0.request import Request, Result
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.messages import Cancel, Computed, Heartbeat, Prune, Segment

# no open session of that number; sent before, or out of its epoch; no message that the protocol allows
DropReason = Literal["session", "stale", "frame"]

# ---- of one session ----------------------------------------------------------------------------


class SessionOpened(NamedTuple):
    """A request begins, or continues in a new session.

    text           tokens to prefill
    answer_tokens  those of them that the answer has already
    draft_session  a weak reference, because events outlive sessions and their draft models
    """

    session: int
    at: float
    request: Request
    text: int
    answer_tokens: int
    draft_session: weakref.ref[DraftSession]


class SegmentSent(NamedTuple):
    """A segment was sent; ``numbers`` and ``positions`` are those of its rows."""

    session: int
    at: float
    run: int
    numbers: tuple[int, ...]
    positions: tuple[int, ...]


class Pruned(NamedTuple):
    """Of the numbers in [start, stop), the stages keep those in ``keep``."""

    session: int
    at: float
    start: int
    stop: int
    keep: tuple[int, ...]


class Cancelled(NamedTuple):
    session: int
    at: float
    runs: tuple[int, ...]


class StageTimes(NamedTuple):
    session: int
    at: float
    times: Computed


class OutputArrived(NamedTuple):
    """It may be stale."""

    session: int
    at: float
    run: int
    rows: int


class DraftDeviceWork(NamedTuple):
    """D0 expanded ``rows`` nodes, or verified ``rows`` rows of ``run``, from ``start`` to ``at``.

    tokens         that became text
    answer_tokens  how many the answer has so far
    rounds         of this session so far
    accepted       draft tokens accepted in the round that this verification ended. None if it ended no round, or
                   if it ended the text: the last round has no miss
    finished       whether the answer is complete
    """

    session: int
    at: float
    kind: Literal["draft", "verify"]
    start: float
    rows: int
    run: int = -1
    tokens: tuple[int, ...] = ()
    answer_tokens: int = 0
    rounds: int = 0
    accepted: int | None = None
    finished: bool = False


class SessionEnded(NamedTuple):
    """A request is answered.

    ``result`` None: it ends with an error instead, or gives way to others and will be opened again.
    """

    session: int
    at: float
    result: Result | None


# ---- of the cluster ----------------------------------------------------------------------------


class DrafterLoaded(NamedTuple):
    """D0 has loaded a draft model.

    ``graph_sizes``: for how many different numbers of rows its passes run as CUDA graphs.
    """

    graph_sizes: int


class MessagesDropped(NamedTuple):
    """D0 drops ``number`` messages."""

    reason: DropReason
    number: int


class HeartbeatArrived(NamedTuple):
    at: float
    beat: Heartbeat


class StagesLost(NamedTuple):
    """A stage was lost, and with it every open session; the cluster waits for it, or ends."""

    at: float
    reason: str


class StagesMissing(NamedTuple):
    """During a recovery: the stages that are lost and not back yet, V1 is 1; at each change."""

    at: float
    stages: Sequence[int]


class StagesBack(NamedTuple):
    """All stages, or their replacements, are back."""

    at: float


SessionEvent = (SessionOpened | SegmentSent | Pruned | Cancelled | StageTimes | OutputArrived | DraftDeviceWork
                | SessionEnded)
RunEvent = (SessionEvent | DrafterLoaded | MessagesDropped | HeartbeatArrived | StagesLost | StagesMissing
            | StagesBack)


def message_event(message: Segment | Prune | Cancel, at: float) -> SegmentSent | Pruned | Cancelled:
    """Return the event of a message to the stages."""
    match message:
        case Segment():
            return SegmentSent(message.session, at, message.run, tuple(message.numbers.tolist()),
                               tuple(message.positions.tolist()))
        case Prune():
            return Pruned(message.session, at, message.start, message.stop, tuple(message.keep.tolist()))
        case Cancel():
            return Cancelled(message.session, at, message.runs)


class SessionProgress:
    """What the events of one session have told of its answer so far."""

    def __init__(self, draft_session: DraftSession) -> None:
        self._draft_session = draft_session
        self._reported = len(draft_session.tokens)
        self._rounds = -1  # that have ended; -1 before the first token
        self._at_round = self._reported  # tokens at the newest round's end

    def opened(self, at: float) -> SessionOpened:
        session = self._draft_session
        return SessionOpened(session.builder.session, at, session.request, len(session.request.prompt) + self._reported,
                             self._reported, weakref.ref(session))

    def verified(self, start: float, at: float, rows: int, run: int) -> DraftDeviceWork:
        session = self._draft_session
        tokens, self._reported = tuple(session.tokens[self._reported:]), len(session.tokens)
        return DraftDeviceWork(session.builder.session, at, "verify", start, rows, run, tokens, self._reported,
                               session.strategy.counters.rounds, self._accepted(), session.finished)

    def _accepted(self) -> int | None:
        session, before, rounds = self._draft_session, self._at_round, self._rounds
        if self._reported == before or session.strategy.counters.rounds <= rounds:
            return None
        self._rounds, self._at_round = session.strategy.counters.rounds, self._reported
        return None if rounds < 0 or session.finished else self._reported - before - 1  # the last was the miss
