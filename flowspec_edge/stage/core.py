"""What a stage decides: which segments it computes next, what ends a pass early, and what it sends.

    core.arrive(segments, size, now)       # from the data link
    core.receive(message, now)             # Open, Close, Prune, Cancel: at any time, also while a pass runs
    begun = core.next_pass()               # None: nothing to compute
    core.compute(begun, poll)
    core.charge(begun, start, seconds)     # emulated and virtual devices: it lasts until ``begun.end``
    core.finish(begun, start, end, now)
    core.take_outgoing()                   # Credits, Taps, Computed for D0; a result for the next device

A state machine without sockets, clocks or threads.  Drivers: ``drivers.stage`` in real time,
``drivers.virtual.stage`` on an event queue.  The data and the control channel are not ordered: the first
segments of a session may overtake its Open.  They wait for it, and other sessions' segments pass them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from flowspec_edge.stage.rows import without_rows

if TYPE_CHECKING:
    from flowspec_edge.stage.engine import Poll, Results, StageEngine

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
    results    by segment
    rows       computed, by segment
    cancelled  by segment
    start, end  of a charged pass, which ends at ``end`` at the latest
    """

    received: Sequence[Segment]
    segments: list[Segment]
    context: int
    results: list[Results] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    cancelled: list[bool] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0

    @property
    def admitted_rows(self) -> int:
        """Of the segments that were not cancelled."""
        skipped = self.cancelled or [False] * len(self.segments)
        return sum(len(segment.numbers) for segment, skip in zip(self.segments, skipped, strict=True)
                   if not skip)


class StageCore:
    """``engine``: computes; ``counters``: of the sessions."""

    def __init__(self, engine: StageEngine, stage: int = 1, layers: float = 1.0,
                 open_within_s: float = math.inf) -> None:
        """stage          from 1
        layers         of a charged pass: equal steps between which a stage checks for cancels
        open_within_s  how long segments wait for their session's Open
        """
        self.engine = engine
        self.counters = StageCounters()
        self._stage = stage
        self._layers = max(layers, 1.0)
        self._open_within_s = open_within_s
        self._arrived: deque[_Arrival] = deque()
        self._charged: Pass | None = None
        self._outgoing: list[Outgoing] = []

    # ---- messages ------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return len(self._arrived) < QUEUED

    def arrive(self, segments: Sequence[Segment], size: int, now: float) -> None:
        """A message of ``size`` bytes came over the data link."""
        self._arrived.append(_Arrival(segments, size, now + self._open_within_s))

    def receive(self, message: Open | Close | Prune | Cancel, now: float) -> bool:
        """Return whether an Open's session is the only one. ProtocolError as the engine's."""
        match message:
            case Prune():
                self.engine.prune(message)
            case Cancel():
                self.engine.cancel(message)
                self._break_off(now, message.session, message.runs)
            case Open():
                if message.session not in self.counters:
                    self.counters.mark_ended(message.session)  # if the engine refuses to open it
                self.engine.open(message)
                return self.counters.open(message.session, message.epoch, message.concurrent, message.timed)
            case Close():
                if message.session in self.counters:
                    self.counters.close(message.session)
                else:
                    self.counters.mark_ended(message.session)
                self.engine.close(message)
                self._break_off(now, message.session)
        return False

    def take_outgoing(self) -> list[Outgoing]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def overdue(self, now: float) -> str:
        """Drop the oldest message of a session whose Open never came, and return the reason; "" if none is
        due."""
        early = next((arrival for arrival in self._arrived if self._unopened(arrival)), None)
        if early is None or (now <= early.until and self.has_room):
            return ""
        self._arrived.remove(early)
        self._credit(early.segments[0])
        limit = f"within {self._open_within_s:g} s" if now > early.until else f"while {QUEUED} messages came"
        return f"received a segment of session {self._unopened(early)[0]}, but no Open for it {limit}"

    def _unopened(self, arrival: _Arrival) -> list[int]:
        return [segment.session for segment in arrival.segments
                if self.counters.awaits_open(segment.session, segment.epoch)]

    # ---- passes --------------------------------------------------------------------------------

    def next_pass(self) -> Pass | None:
        """Admit the oldest message that may be computed; one of which nothing is alive is passed over.
        ProtocolError if a segment violates the protocol, such as after a lost one."""
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
                return Pass(segments, admitted, sum(self.engine.cached(one.session) for one in admitted))
            self._credit(segments[0])  # it occupied a slot at V1 nevertheless
        return None

    def _take(self) -> Sequence[Segment]:
        """The segments of the oldest message that may be computed; empty without one."""
        held: set[int] = set()  # sessions that wait for an Open, and those of messages behind them
        for arrival in self._arrived:
            sessions = {segment.session for segment in arrival.segments}
            waits = bool(self._unopened(arrival))
            if waits or not held.isdisjoint(sessions):
                held |= sessions
                continue
            self._arrived.remove(arrival)
            self.counters.add_bytes("bytes_in", arrival.size, arrival.segments)
            return arrival.segments
        return ()

    def compute(self, begun: Pass, poll: Poll | None = None) -> None:
        """Run the engine; ``poll`` may call :meth:`receive`. Raises as ``StageEngine.compute``; then the
        slot of V1 is free."""
        rows, cancelled = self._counted("rows", begun), self._counted("cancelled", begun)
        try:
            begun.results = self.engine.compute(begun.segments, poll)
        except BaseException:
            self._credit(begun.received[0])
            raise
        # A session that has ended meanwhile has no counters.
        begun.rows = [max(0, int(now - before)) for now, before in
                      zip(self._counted("rows", begun), rows, strict=True)]
        begun.cancelled = [now > before for now, before in
                           zip(self._counted("cancelled", begun), cancelled, strict=True)]

    def _counted(self, counter: str, begun: Pass) -> list[float]:
        return [self.engine.counters_of(segment.session).get(counter, 0) for segment in begun.segments]

    def charge(self, begun: Pass, start: float, seconds: float) -> None:
        """A computed pass takes ``seconds`` from ``start`` on, unless all of it is cancelled, or has been."""
        begun.start = start
        begun.end = start if all(begun.cancelled) else start + seconds
        self._charged = begun

    def _break_off(self, now: float, session: int, runs: Collection[int] | None = None) -> None:
        """Empty the results of a cancelled segment of the charged pass; ``runs``: None for all.  A pass
        without others ends with its current layer, as a stage polls between layers."""
        begun = self._charged
        if begun is None:
            return
        layer = (begun.end - begun.start) / self._layers
        for i, segment in enumerate(begun.segments):
            if segment.session != session or (runs is not None and segment.run not in runs):
                continue
            if begun.cancelled[i] or layer <= 0:
                continue
            begun.results[i] = [], without_rows(begun.results[i][1])
            begun.cancelled[i] = True
            if all(cancelled or not len(other.numbers)
                   for cancelled, other in zip(begun.cancelled, begun.segments, strict=True)):
                done = math.ceil((now - begun.start) / layer - 1e-9)
                begun.end = min(begun.end, begun.start + done * layer)

    def finish(self, begun: Pass, start: float, end: float, now: float) -> None:
        """Count a pass that took from ``start`` to ``end``, in seconds, and send its results."""
        self._charged = None
        rows = [0 if cancelled else count
                for count, cancelled in zip(begun.rows, begun.cancelled, strict=True)]
        self.counters.add_pass(end - start, begun.segments, {
            segment.session: count for segment, count in zip(begun.segments, rows, strict=True)})
        self._credit(begun.received[0])  # first: the stage may have nothing else to do
        self._outgoing += [tap for taps, _ in begun.results for tap in taps]
        self._outgoing.append(batch_of([result for _, result in begun.results]))
        times = [round(moment * 1e6) for moment in (start, end, now)]
        for segment, count in zip(begun.segments, rows, strict=True):
            if self.counters.timed(segment.session):
                self._outgoing.append(Computed(segment.session, segment.epoch, segment.run, self._stage,
                                               count, sum(rows), *times))

    def _credit(self, segment: Segment) -> None:
        """V1 tells D0 that it has room for another segment."""
        if self._stage == 1:
            self._outgoing.append(Credit(segment.session, segment.epoch, segment.run))
