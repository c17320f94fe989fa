"""One verification device in virtual time: drives a stage's core on the event queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from flowspec_edge.drivers.virtual.clock import EventClock, Span
from flowspec_edge.drivers.virtual.devices import StageSeconds
from flowspec_edge.messages import Batch, Cancel, Close, Open, Prune, Segment, parts_of
from flowspec_edge.stage.core import (
    Arrived,
    Charged,
    Emit,
    Idle,
    Outgoing,
    Pass,
    Passed,
    Reject,
    StageCore,
)
from flowspec_edge.stage.engine import StageEngine


@dataclass(eq=False)
class SessionWork:
    compute_s: float = 0.0
    rows: int = 0
    segments: int = 0
    cancelled: int = 0


class VirtualStage:
    def __init__(self, index: int, clock: EventClock, engine: StageEngine,
                 seconds: StageSeconds, layers: float, send: Callable[[Outgoing], None],
                 spans: list[Span]) -> None:
        """Set up a stage that is idle.

        index    from 1
        seconds  of a pass, by its rows, the rows in the cache, what experts it touched, and how many pairs of
                 rows are of one request
        layers   equal steps of that duration, between which the stage checks for cancels
        send     called with each message that leaves the stage
        spans    the stage appends its busy spans
        """
        self.core = StageCore(engine, index, layers=layers)
        self._work: defaultdict[int, SessionWork] = defaultdict(SessionWork)
        self._index = index
        self._engine = engine
        self._clock = clock
        self._seconds = seconds
        self._send = send
        self._spans = spans
        self._running: Pass | None = None

    def work(self, session: int) -> SessionWork:
        """Return what the stage has done for a session. Segments already cancelled in the running pass are included."""
        running, work = self._running, self._work[session]
        cancelled = sum(is_cancelled and segment.session == session for segment, is_cancelled in
                        zip(running.segments, running.cancelled, strict=True)) if running else 0
        return replace(work, cancelled=work.cancelled + cancelled)

    def receive(self, message: Segment | Batch | Open | Prune | Cancel | Close) -> None:
        if isinstance(message, Segment | Batch):
            segments = [part for part in parts_of(message) if isinstance(part, Segment)]
            self.core.feed(Arrived(segments, 0), self._clock.now)
            self._pump()
            return
        running = self._running
        end = running.end if running else 0.0
        self.core.feed(message, self._clock.now)
        if running and running.end != end:
            self._clock.at(max(running.end, self._clock.now), lambda: self._finish(running))

    def _pump(self) -> None:
        """Do what the core says, until a pass is over or a segment comes."""
        while self._running is None and not isinstance(action := self.core.next(self._clock.now), Idle):
            match action:
                case Emit(messages):
                    for message in messages:
                        self._send(message)
                case Pass():
                    self._begin(action)
                case Reject(reason):
                    raise AssertionError(f"every Open comes before its segments here: {reason}")

    def _begin(self, running: Pass) -> None:
        # Compute now and charge the time: no message that arrives meanwhile changes the result, because
        # hints never change what a live row sees.
        running.compute(lambda: None)
        self.core.feed(Charged(self._clock.now, self._seconds(
            running.admitted_rows, running.context, self._engine.correlation(running.computed_rows), running.alike)),
            self._clock.now)
        self._running = running
        self._clock.at(running.end, lambda: self._finish(running))

    def _finish(self, running: Pass) -> None:
        if self._running is not running:
            return  # it was cut short, and has ended already
        self._running = None
        self.core.feed(Passed(running.start, running.end), self._clock.now)
        for segment, result in zip(running.segments, running.results, strict=True):
            work = self._work[segment.session]
            work.compute_s += running.end - running.start
            work.rows += result.rows
            work.segments += result.rows > 0
            work.cancelled += result.cancelled
        if running.end > running.start:
            self._spans.append(Span(self._index, "compute", running.start, running.end, running.segments[0].run,
                                    sum(len(segment.numbers) for segment in running.segments),
                                    all(running.cancelled), running.segments[0].session))
        self._pump()
