"""One verification device in virtual time."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from flowspec_edge.messages import Cancel, Close, Computed, Output, Prune, Segment, Tap
from flowspec_edge.runtime.virtual.clock import EventClock, Span
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.rows import without_rows


@dataclass(eq=False)
class _Job:
    segment: Segment
    start: float
    end: float
    messages: list[Segment | Output | Tap]  # its results
    cancelled: bool = False


@dataclass(eq=False)
class SessionWork:
    compute_s: float = 0.0
    rows: int = 0
    segments: int = 0
    cancelled: int = 0


@dataclass(eq=False)
class VirtualStage:
    """seconds   (rows, rows in the cache) -> duration of a segment
    layers    equal steps of that duration, between which the stage checks for cancels
    forward   called with each message that leaves the stage
    finished  called with each segment when the stage is done with it
    spans     the stage appends its busy spans
    """

    index: int  # from 1
    clock: EventClock
    engine: StageEngine
    seconds: Callable[[int, int], float]
    layers: float
    forward: Callable[[Segment | Output | Tap], None]
    finished: Callable[[Segment], None]
    on_timing: Callable[[Computed], None]
    spans: list[Span]
    queue: deque[Segment] = field(default_factory=deque)
    work: defaultdict[int, SessionWork] = field(default_factory=lambda: defaultdict(SessionWork))
    _job: _Job | None = None

    def receive(self, message: Segment | Prune | Cancel | Close) -> None:
        match message:
            case Segment():
                self.queue.append(message)
                self._start()
            case Prune():
                self.engine.prune(message)
            case Cancel():
                self.engine.cancel(message)
                if self._job and self._job.segment.run in message.runs:
                    self._break_off(message.session)
            case Close():
                self.engine.close(message)
                self._break_off(message.session)

    def _start(self) -> None:
        if self._job or not self.queue:
            return
        segment = self.queue.popleft()
        admitted = self.engine.admit(segment)
        if admitted is None:
            self.finished(segment)
            self._start()
            return
        before = self.engine.counters["cancelled"]
        # Compute now and charge the time: no message that arrives meanwhile changes the result, because
        # hints never change what a live row sees.
        context = self.engine.cached(segment.session)
        taps, output = self.engine.compute(admitted)
        skipped = self.engine.counters["cancelled"] > before
        seconds = 0.0 if skipped else self.seconds(len(admitted.numbers), context)
        self.work[segment.session].cancelled += skipped
        now = self.clock.now
        job = self._job = _Job(admitted, now, now + seconds, [*taps, output], skipped)
        self.clock.at(job.end, lambda: self._finish(job))

    def _break_off(self, session: int) -> None:
        """A cancelled job ends with its current layer, as a real stage polls between layers."""
        job = self._job
        if job is None or job.cancelled or job.segment.session != session:
            return
        layer = (job.end - job.start) / max(self.layers, 1.0)
        if layer <= 0:
            return
        done = math.ceil((self.clock.now - job.start) / layer - 1e-9)
        end = min(job.end, job.start + done * layer)
        messages = [without_rows(m) for m in job.messages if not isinstance(m, Tap)]
        self.work[session].cancelled += 1
        self._job = short = _Job(job.segment, job.start, end, list(messages), True)
        self.clock.at(max(end, self.clock.now), lambda: self._finish(short))

    def _finish(self, job: _Job) -> None:
        if self._job is not job:
            return  # it was cut short, and has ended already
        self._job = None
        rows, work = len(job.segment.numbers), self.work[job.segment.session]
        work.compute_s += job.end - job.start
        if not job.cancelled:
            work.rows += rows
            work.segments += rows > 0
        if job.end > job.start:
            self.spans.append(Span(self.index, "compute", job.start, job.end, job.segment.run, rows,
                                   job.cancelled, job.segment.session))
        times = (round(moment * 1e6) for moment in (job.start, job.end, self.clock.now))
        self.on_timing(Computed(job.segment.session, job.segment.epoch, job.segment.run, self.index,
                                0 if job.cancelled else rows, *times))
        for message in job.messages:
            self.forward(message)
        self.finished(job.segment)
        self._start()
