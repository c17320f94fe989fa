"""One verification device in virtual time: a queue, a stage engine, and a cost for each segment.

Knows when the device is busy and what a cancel or the end of a session cuts short.  Does not know who
sends or receives.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from flowspec_edge.messages import Cancel, Close, Computed, Output, Prune, Segment, Tap
from flowspec_edge.runtime.events import Clock, Span
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.rows import emptied


@dataclass(eq=False)
class _Job:
    """What is being computed."""

    segment: Segment
    start: float
    end: float
    messages: list[Segment | Output | Tap]  # what comes of it
    cancelled: bool = False


@dataclass(eq=False)
class Share:
    """What a stage has done for one session."""

    compute_s: float = 0.0
    rows: int = 0
    segments: int = 0
    cancelled: int = 0


@dataclass(eq=False)
class VirtualStage:
    """A stage engine that takes made-up time.

    seconds   what a segment of so many rows takes, with so many rows in the cache
    layers    equal steps of that time, between which a cancel is seen
    forward   takes each message that leaves the stage
    finished  called with each segment when the stage is done with it
    told      called with when it was computed
    spans     where the stage notes when it was busy
    shares    what it has done, by session
    """

    index: int  # from 1
    clock: Clock
    engine: StageEngine
    seconds: Callable[[int, int], float]
    layers: float
    forward: Callable[[Segment | Output | Tap], None]
    finished: Callable[[Segment], None]
    told: Callable[[Computed], None]
    spans: list[Span]
    queue: deque[Segment] = field(default_factory=deque)
    shares: defaultdict[int, Share] = field(default_factory=lambda: defaultdict(Share))
    _job: _Job | None = None

    def receive(self, message: Segment | Prune | Cancel | Close) -> None:
        """A message has arrived over one of the links."""
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
        # The tokens are computed at once, the time they take is charged: nothing that arrives
        # meanwhile could change them, for hints never change what a live row sees.
        context = self.engine.cached(segment.session)
        taps, output = self.engine.compute(admitted)
        skipped = self.engine.counters["cancelled"] > before
        seconds = 0.0 if skipped else self.seconds(len(admitted.numbers), context)
        self.shares[segment.session].cancelled += skipped
        now = self.clock.now
        job = self._job = _Job(admitted, now, now + seconds, [*taps, output], skipped)
        self.clock.at(job.end, lambda: self._finish(job))

    def _break_off(self, session: int) -> None:
        """The stage polls between layers: a job that is given up ends with the layer it is in."""
        job = self._job
        if job is None or job.cancelled or job.segment.session != session:
            return
        layer = (job.end - job.start) / max(self.layers, 1.0)
        if layer <= 0:
            return
        done = math.ceil((self.clock.now - job.start) / layer - 1e-9)
        end = min(job.end, job.start + done * layer)
        messages = [emptied(m) for m in job.messages if not isinstance(m, Tap)]
        self.shares[session].cancelled += 1
        self._job = short = _Job(job.segment, job.start, end, list(messages), True)
        self.clock.at(max(end, self.clock.now), lambda: self._finish(short))

    def _finish(self, job: _Job) -> None:
        if self._job is not job:
            return  # it was broken off, and that was its end
        self._job = None
        rows, share = len(job.segment.numbers), self.shares[job.segment.session]
        share.compute_s += job.end - job.start
        if not job.cancelled:
            share.rows += rows
            share.segments += rows > 0
        if job.end > job.start:
            self.spans.append(Span(self.index, "compute", job.start, job.end, job.segment.run, rows,
                                   job.cancelled, job.segment.session))
        times = (round(moment * 1e6) for moment in (job.start, job.end, self.clock.now))
        self.told(Computed(job.segment.session, job.segment.epoch, job.segment.run, self.index,
                           0 if job.cancelled else rows, *times))
        for message in job.messages:
            self.forward(message)
        self.finished(job.segment)
        self._start()
