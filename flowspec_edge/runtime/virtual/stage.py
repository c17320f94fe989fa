"""One verification device in virtual time."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flowspec_edge.messages import (
    Batch,
    Cancel,
    Close,
    Computed,
    Output,
    Prune,
    Segment,
    Tap,
    batch_of,
    parts_of,
)
from flowspec_edge.runtime.virtual.clock import EventClock, Span
from flowspec_edge.stage.base import Results
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.rows import without_rows


@dataclass(eq=False)
class _Pass:
    """``received``: the message, whose first segment names it; ``results``: by segment that was admitted."""

    received: tuple[Segment, ...]
    start: float
    end: float
    segments: list[Segment]
    results: list[Results]
    cancelled: list[bool]


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
    finished  called with each pass' first segment when the stage is done with it
    spans     the stage appends its busy spans
    """

    index: int  # from 1
    clock: EventClock
    engine: StageEngine
    seconds: Callable[[int, int], float]
    layers: float
    forward: Callable[[Segment | Output | Batch | Tap], None]
    finished: Callable[[Segment], None]
    on_timing: Callable[[Computed], None]
    spans: list[Span]
    queue: deque[tuple[Segment, ...]] = field(default_factory=deque)
    work: defaultdict[int, SessionWork] = field(default_factory=lambda: defaultdict(SessionWork))
    _pass: _Pass | None = None

    def receive(self, message: Segment | Batch | Prune | Cancel | Close) -> None:
        match message:
            case Segment() | Batch():
                self.queue.append(tuple(part for part in parts_of(message) if isinstance(part, Segment)))
                self._start()
            case Prune():
                self.engine.prune(message)
            case Cancel():
                self.engine.cancel(message)
                self._break_off(message.session, message.runs)
            case Close():
                self.engine.close(message)
                self._break_off(message.session)

    def _start(self) -> None:
        if self._pass or not self.queue:
            return
        received = self.queue.popleft()
        admitted = [alive for segment in received if (alive := self.engine.admit(segment)) is not None]
        if not admitted:
            self.finished(received[0])
            self._start()
            return
        before = self._cancelled_of(admitted)
        # Compute now and charge the time: no message that arrives meanwhile changes the result, because
        # hints never change what a live row sees.
        context = sum(self.engine.cached(segment.session) for segment in admitted)
        results = self.engine.compute(admitted)
        skipped = [now > then for now, then in zip(self._cancelled_of(admitted), before, strict=True)]
        rows = sum(len(segment.numbers) for segment, skip in zip(admitted, skipped, strict=True) if not skip)
        seconds = 0.0 if all(skipped) else self.seconds(rows, context)
        for segment, skip in zip(admitted, skipped, strict=True):
            self.work[segment.session].cancelled += skip
        now = self.clock.now
        begun = self._pass = _Pass(received, now, now + seconds, admitted, results, skipped)
        self.clock.at(begun.end, lambda: self._finish(begun))

    def _cancelled_of(self, segments: Sequence[Segment]) -> list[float]:
        return [self.engine.counters_of(segment.session)["cancelled"] for segment in segments]

    def _break_off(self, session: int, runs: Collection[int] | None = None) -> None:
        """Empty the results of a cancelled segment; ``runs``: None for all. A pass without others ends with
        its current layer, as a real stage polls between layers."""
        running = self._pass
        if running is None:
            return
        for i, segment in enumerate(running.segments):
            ends = segment.session == session and (runs is None or segment.run in runs)
            if not ends or running.cancelled[i]:
                continue
            layer = (running.end - running.start) / max(self.layers, 1.0)
            if layer <= 0:
                return
            self.work[session].cancelled += 1
            running.results[i] = [], without_rows(running.results[i][1])
            running.cancelled[i] = True
            if all(cancelled or not len(other.numbers)
                   for cancelled, other in zip(running.cancelled, running.segments, strict=True)):
                done = math.ceil((self.clock.now - running.start) / layer - 1e-9)
                end = min(running.end, running.start + done * layer)
                self._pass = replace(running, end=end)
                self.clock.at(max(end, self.clock.now), partial(self._finish, self._pass))

    def _finish(self, ended: _Pass) -> None:
        if self._pass is not ended:
            return  # it was cut short, and has ended already
        self._pass = None
        start, end, segments = ended.start, ended.end, ended.segments
        counts = [0 if cancelled else len(segment.numbers)
                  for segment, cancelled in zip(segments, ended.cancelled, strict=True)]
        times = [round(moment * 1e6) for moment in (start, end, self.clock.now)]
        for segment, rows, cancelled in zip(segments, counts, ended.cancelled, strict=True):
            work = self.work[segment.session]
            work.compute_s += end - start
            if not cancelled:
                work.rows += rows
                work.segments += rows > 0
            self.on_timing(Computed(segment.session, segment.epoch, segment.run, self.index, rows,
                                    sum(counts), *times))
        if end > start:
            self.spans.append(Span(self.index, "compute", start, end, segments[0].run,
                                   sum(len(segment.numbers) for segment in segments), all(ended.cancelled),
                                   segments[0].session))
        for taps, _ in ended.results:
            for tap in taps:
                self.forward(tap)
        self.forward(batch_of([result for _, result in ended.results]))
        self.finished(ended.received[0])
        self._start()
