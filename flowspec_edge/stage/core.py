"""What a stage decides: which segments it computes next, what ends a pass early, and what it sends.

    core.feed(event, now)                 # Arrived, Open, Close, Prune, Cancel: also while a pass runs
    match core.next(now):
        case Emit(messages): …            # Credits, Taps, Computed for D0; a result for the next device
        case Pass() as begun: …           # begun.compute(poll), [feed Charged,] then feed Passed
        case Reject(reason): …            # the previous device broke the protocol
        case Idle(): …                    # nothing to do until the next event

A state machine without sockets, clocks or threads.  Drivers: ``drivers.stage`` in real time,
``drivers.virtual.stage`` on an event queue.  The data and the control channel are not ordered: the first
segments of a session may overtake its Open.  They wait for it, and other sessions' segments pass them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowspec_edge.messages import (
    Batch,
    Cancel,
    Close,
    Computed,
    Credit,
    Open,
    Output,
    Prune,
    Segment,
    Tap,
    batch_of,
)
from flowspec_edge.stage.counters import StageCounters
from flowspec_edge.stage.engine import Poll, SegmentResult, StageEngine
from flowspec_edge.stage.rows import without_rows

QUEUED = 64  # messages; many times what an honest device has under way
Outgoing = Credit | Tap | Computed | Segment | Output | Batch


@dataclass(eq=False)
class _Arrival:
    segments: Sequence[Segment]
    size: int  # bytes
    until: float  # when its sessions must be open


@dataclass(eq=False)
class Pass:
    """One computation of the layers.

    received   the message's segments; the first one names it in credits
    segments   those of them that were admitted
    context    rows in their caches before it
    compute    runs the layers, and calls ``poll`` between them, which may feed the core. Raises as
               ``StageEngine.compute``; then the pass is over, and the slot of V1 free
    results    by segment
    start, end  of a charged pass, which ends at ``end`` at the latest
    """

    received: Sequence[Segment]
    segments: list[Segment]
    context: int
    compute: Callable[[Poll], None]
    results: list[SegmentResult] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0

    @property
    def computed_rows(self) -> int:
        """That went through the layers, of all segments."""
        return sum(result.rows for result in self.results)

    @property
    def cancelled(self) -> list[bool]:
        """Whether each segment is cancelled; empty before the layers have run."""
        return [result.cancelled for result in self.results]

    @property
    def admitted_rows(self) -> int:
        """Rows of the segments that were not cancelled."""
        skipped = self.cancelled or [False] * len(self.segments)
        return sum(len(segment.numbers) for segment, skip in zip(self.segments, skipped, strict=True)
                   if not skip)

    @property
    def alike(self) -> float:
        """Share of the pairs of admitted rows that belong to one request: 1 for the rows of one segment."""
        skipped = self.cancelled or [False] * len(self.segments)
        rows = [len(segment.numbers) for segment, skip in zip(self.segments, skipped, strict=True) if not skip]
        row_pairs = sum(rows) * (sum(rows) - 1)
        return sum(n * (n - 1) for n in rows) / row_pairs if row_pairs else 1.0


# ---- events and actions ------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrived:
    """A message of ``size`` bytes came over the data link."""

    segments: Sequence[Segment]
    size: int


@dataclass(frozen=True)
class Charged:
    """The running pass, whose layers have run, takes ``seconds`` from ``start`` on (emulated and virtual devices).

    Or less, if all of it is cancelled: until its ``end``.
    """

    start: float
    seconds: float


@dataclass(frozen=True)
class Passed:
    """The running pass is over; it took from ``start`` to ``end``, in seconds."""

    start: float
    end: float


StageEvent = Arrived | Open | Close | Prune | Cancel | Charged | Passed


@dataclass(frozen=True)
class Emit:
    """Send these messages in this order."""

    messages: Sequence[Outgoing]


@dataclass(frozen=True)
class Reject:
    """A message of the previous device was dropped, because it broke the protocol."""

    reason: str


@dataclass(frozen=True)
class Idle:
    """Nothing to do before the next event, or before the running pass is over."""


StageAction = Emit | Pass | Reject | Idle


class StageCore:
    """A stage without input and output.

    ``engine``: computes; ``counters``: of the sessions.
    """

    def __init__(self, engine: StageEngine, stage: int = 1, layers: float = 1.0,
                 open_within_s: float = math.inf) -> None:
        """Set up a stage without sessions.

        stage          from 1
        layers         of a charged pass: equal steps between which a stage checks for cancels
        open_within_s  how long segments wait for their session's Open
        """
        self.engine = engine
        self.counters = StageCounters()
        self._stage = stage
        self._layers = max(layers, 1.0)
        self._open_within_s = open_within_s
        self._arrived: deque[_Arrival] = deque()
        self._pass: Pass | None = None  # admitted, until it is over
        self._handed_out = False  # a driver has it
        self._charged = False
        self._outgoing: list[Outgoing] = []
        self._broken = ""  # how the previous device broke the protocol, to be said

    @property
    def has_room(self) -> bool:
        return len(self._arrived) < QUEUED

    # ---- the interface of drivers --------------------------------------------------------------

    def feed(self, event: StageEvent, now: float) -> None:
        """Take in what happened. ProtocolError as the engine's ``open`` and ``close``."""
        match event:
            case Arrived():
                self._arrived.append(_Arrival(event.segments, event.size, now + self._open_within_s))
            case Prune():
                self.engine.prune(event)
            case Cancel():
                self.engine.cancel(event)
                self._break_off(now)
            case Open():
                if event.session not in self.counters:
                    self.counters.mark_ended(event.session)  # if the engine refuses to open it
                self.engine.open(event)
                self.counters.open(event.session, event.epoch, event.concurrent, event.timed)
            case Close():
                if event.session in self.counters:
                    self.counters.close(event.session)
                else:
                    self.counters.mark_ended(event.session)
                self.engine.close(event)
                self._break_off(now)
            case Charged():
                self._charge(event)
            case Passed():
                self._finish(event, now)

    def next(self, now: float) -> StageAction:
        """Return what the driver has to do.

        ProtocolError if a segment violates the protocol, such as after a lost one.
        """
        if self._pass is None and not self._outgoing and not self._broken:
            self._pass = self._admit()
            if self._pass is None and not self._outgoing:
                self._broken = self._overdue(now)
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            return Emit(outgoing)
        if self._broken:
            reason, self._broken = self._broken, ""
            return Reject(reason)
        if self._pass is not None and not self._handed_out:
            self._handed_out = True
            return self._pass
        return Idle()

    def left_of(self, message: Outgoing) -> Outgoing | None:
        """Return what is still to be sent of ``message``, without the data of ended sessions.

        None if nothing: a restarted peer would wait for their Opens.
        """
        match message:
            case Segment() | Output() | Tap():
                return message if message.session in self.counters else None
            case Batch(parts):
                alive = [part for part in parts if part.session in self.counters]
                return batch_of(alive) if alive else None
        return message

    # ---- which segments come next --------------------------------------------------------------

    def _overdue(self, now: float) -> str:
        """Drop the oldest message of a session whose Open never came, and return the reason; "" if none is due."""
        unopened = next((arrival for arrival in self._arrived if self._unopened(arrival)), None)
        if unopened is None or (now <= unopened.until and self.has_room):
            return ""
        self._arrived.remove(unopened)
        self._credit(unopened.segments[0])
        limit = f"within {self._open_within_s:g} s" if now > unopened.until else f"while {QUEUED} messages came"
        return f"received a segment of session {self._unopened(unopened)[0]}, but no Open for it {limit}"

    def _unopened(self, arrival: _Arrival) -> list[int]:
        return [segment.session for segment in arrival.segments
                if self.counters.awaits_open(segment.session, segment.epoch)]

    def _admit(self) -> Pass | None:
        """Admit the oldest message that may be computed; one of which nothing is alive is passed over."""
        while segments := self._take():
            admitted: list[Segment] = []
            try:
                for segment in segments:
                    if (alive := self.engine.admit(segment)) is not None:
                        admitted.append(alive)
            except BaseException:
                self._credit(segments[0])
                raise
            if admitted:
                self._handed_out = False
                return Pass(segments, admitted, sum(self.engine.cached(part.session) for part in admitted),
                            self._compute)
            self._credit(segments[0])  # it occupied a slot at V1 nevertheless
        return None

    def _take(self) -> Sequence[Segment]:
        """Return the segments of the oldest message that may be computed; empty without one."""
        blocked: set[int] = set()  # sessions that wait for an Open, and those of messages behind them
        for arrival in self._arrived:
            sessions = {segment.session for segment in arrival.segments}
            waits = bool(self._unopened(arrival))
            if waits or not blocked.isdisjoint(sessions):
                blocked |= sessions
                continue
            self._arrived.remove(arrival)
            self.counters.add_bytes("bytes_in", arrival.size, arrival.segments)
            return arrival.segments
        return ()

    # ---- passes --------------------------------------------------------------------------------

    def _compute(self, poll: Poll) -> None:
        running = self._pass
        assert running is not None
        try:
            running.results = self.engine.compute(running.segments, poll)
        except BaseException:
            self._pass = None
            self._credit(running.received[0])
            raise

    def _charge(self, event: Charged) -> None:
        running = self._pass
        assert running is not None
        running.start = event.start
        running.end = event.start if all(running.cancelled) else event.start + event.seconds
        self._charged = True

    def _break_off(self, now: float) -> None:
        """Empty the results of a charged pass that the engine does not want any more.

        A pass whose results are all empty ends with its current layer, because a stage polls between layers.
        """
        running = self._pass
        if running is None or not self._charged:
            return
        layer_s = (running.end - running.start) / self._layers
        for i, (segment, result) in enumerate(zip(running.segments, running.results, strict=True)):
            if result.cancelled or layer_s <= 0 or self.engine.wants(segment):
                continue
            running.results[i] = SegmentResult([], without_rows(result.message), cancelled=True)
            if all(cancelled or not len(other.numbers)
                   for cancelled, other in zip(running.cancelled, running.segments, strict=True)):
                layers_done = math.ceil((now - running.start) / layer_s - 1e-9)
                running.end = min(running.end, running.start + layers_done * layer_s)

    def _finish(self, event: Passed, now: float) -> None:
        """Count the pass, and send its results."""
        finished, self._pass, self._charged = self._pass, None, False
        assert finished is not None
        self.counters.add_pass(event.end - event.start, finished.segments, {
            segment.session: result.rows
            for segment, result in zip(finished.segments, finished.results, strict=True)})
        self._credit(finished.received[0])  # first: the stage may have nothing else to do
        self._outgoing += [tap for result in finished.results for tap in result.taps]
        self._outgoing.append(batch_of([result.message for result in finished.results]))
        times = [round(moment * 1e6) for moment in (event.start, event.end, now)]
        for segment, result in zip(finished.segments, finished.results, strict=True):
            if self.counters.timed(segment.session):
                self._outgoing.append(Computed(segment.session, segment.epoch, segment.run, self._stage,
                                               result.rows, finished.computed_rows, *times))

    def _credit(self, segment: Segment) -> None:
        """V1 tells D0 that it has room for another segment."""
        if self._stage == 1:
            self._outgoing.append(Credit(segment.session, segment.epoch, segment.run))
