"""One verification device in virtual time: drives a stage's core on the event queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from flowspec_edge.drivers.virtual.clock import EventClock, Span
from flowspec_edge.drivers.virtual.devices import StageSeconds
from flowspec_edge.messages import Batch, Cancel, Close, Open, Prune, Segment, parts_of
from flowspec_edge.stage.core import Outgoing, Pass, StageCore
from flowspec_edge.stage.engine import StageEngine


@dataclass(eq=False)
class SessionWork:
    compute_s: float = 0.0
    rows: int = 0
    segments: int = 0
    cancelled: int = 0


class VirtualStage:
    """``work``: by session."""

    def __init__(self, index: int, clock: EventClock, engine: StageEngine,
                 seconds: StageSeconds, layers: float, send: Callable[[Outgoing], None],
                 spans: list[Span]) -> None:
        """index    from 1
        seconds  of a pass, by its rows, the rows in the cache and what experts it touched
        layers   equal steps of that duration, between which the stage checks for cancels
        send     called with each message that leaves the stage
        spans    the stage appends its busy spans
        """
        self.core = StageCore(engine, index, layers=layers)
        self.work: defaultdict[int, SessionWork] = defaultdict(SessionWork)
        self._index = index
        self._engine = engine
        self._clock = clock
        self._seconds = seconds
        self._send = send
        self._spans = spans
        self._running: Pass | None = None

    def receive(self, message: Segment | Batch | Open | Prune | Cancel | Close) -> None:
        if isinstance(message, Segment | Batch):
            segments = [part for part in parts_of(message) if isinstance(part, Segment)]
            self.core.arrive(segments, 0, self._clock.now)
            self._start()
            return
        running = self._running
        end, cancelled = (running.end, list(running.cancelled)) if running else (0.0, [])
        self.core.receive(message, self._clock.now)
        if running:
            self._count_cancelled(running, cancelled)
            if running.end != end:
                self._clock.at(max(running.end, self._clock.now), lambda: self._finish(running))

    def _start(self) -> None:
        if self._running:
            return
        begun = self.core.next_pass()
        self._flush()
        if begun is None:
            return
        # Compute now and charge the time: no message that arrives meanwhile changes the result, because
        # hints never change what a live row sees.
        self.core.compute(begun)
        self.core.charge(begun, self._clock.now, self._seconds(
            begun.admitted_rows, begun.context, self._engine.correlation(sum(begun.rows))))
        self._count_cancelled(begun, [False] * len(begun.segments))
        self._running = begun
        self._clock.at(begun.end, lambda: self._finish(begun))

    def _count_cancelled(self, begun: Pass, before: list[bool]) -> None:
        for segment, now, then in zip(begun.segments, begun.cancelled, before, strict=True):
            self.work[segment.session].cancelled += now > then

    def _finish(self, begun: Pass) -> None:
        if self._running is not begun:
            return  # it was cut short, and has ended already
        self._running = None
        self.core.finish(begun, begun.start, begun.end, self._clock.now)
        for segment, rows, cancelled in zip(begun.segments, begun.rows, begun.cancelled, strict=True):
            work = self.work[segment.session]
            work.compute_s += begun.end - begun.start
            if not cancelled:
                work.rows += rows
                work.segments += rows > 0
        if begun.end > begun.start:
            self._spans.append(Span(self._index, "compute", begun.start, begun.end, begun.segments[0].run,
                                    sum(len(segment.numbers) for segment in begun.segments),
                                    all(begun.cancelled), begun.segments[0].session))
        self._flush()
        self._start()

    def _flush(self) -> None:
        for message in self.core.take_outgoing():
            self._send(message)
