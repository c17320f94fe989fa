"""One run in virtual time: D0, the stages and their links as discrete events.

Coordinators, scheduler and stage engines are those of the real processes; only durations are simulated.
Tensor-parallel devices work in lockstep, so one stage with all layers stands for the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from flowspec_edge.messages import (
    Batch,
    Cancel,
    Close,
    Computed,
    Credit,
    Message,
    Output,
    Prune,
    Segment,
    Tap,
    parts_of,
    shares,
)
from flowspec_edge.runtime.draft_device.coordinator import Coordinator, DraftPass, Verify
from flowspec_edge.runtime.draft_device.scheduling.jobs import Job
from flowspec_edge.runtime.draft_device.scheduling.scheduler import Scheduler
from flowspec_edge.runtime.draft_device.scheduling.slot_curve import SlotCurve
from flowspec_edge.runtime.observe.observer import Observer
from flowspec_edge.runtime.request import OnTokens, Result, SchedulingPolicy
from flowspec_edge.runtime.virtual.clock import EventClock, Span
from flowspec_edge.runtime.virtual.collectives import tensor_bytes
from flowspec_edge.runtime.virtual.devices import Devices
from flowspec_edge.runtime.virtual.links import VirtualLink, wire_bytes
from flowspec_edge.runtime.virtual.stage import VirtualStage
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.strategies.base import Parallelism


@dataclass(eq=False)
class _Running:
    coordinator: Coordinator
    on_tokens: OnTokens | None
    done: Callable[[Result], None]
    since: float
    bytes_out: list[int]  # on each stage's data link
    bytes: int = 0  # on all links
    bytes_in: int = 0  # to V1 on the data link; to all devices of a group


class VirtualRun:
    """Runs requests until none is left."""

    def __init__(self, engines: list[StageEngine], devices: Devices, parallelism: Parallelism,
                 clock: EventClock, spans: list[Span], observer: Observer, curve: SlotCurve | None = None,
                 policy: SchedulingPolicy = "fair") -> None:
        """engines  one per device, or one for a tensor-parallel group
        curve    learns from the stages' reports; only then are the reports' bytes charged
        """
        self._observer = observer
        self._curve = curve
        self._timed: set[int] = set()  # sessions whose segments' times the observer wants; not charged
        self._learned: set[int] = set()  # sessions whose segments' times go into the curve
        self._scheduler = Scheduler(clock=lambda: clock.now, policy=policy)
        self._running: dict[int, _Running] = {}
        self._engines = engines
        self._devices = devices
        self._profile = devices.d0  # all devices have the same model
        self._clock = clock
        self._spans = spans
        self._busy = False
        self._expected = 0  # requests that have not arrived
        n = self._count = len(devices.stages)
        self._parallelism = parallelism
        self._grouped = parallelism != "pipeline"

        def link(sender: int, receiver: int, hops: int = 1) -> VirtualLink:
            return VirtualLink(clock, partial(devices.hop_seconds, sender, receiver), hops)

        # A group's token ids go from device to device; its outputs leave from the last one.
        ring = [0, *range(1, n + 1), 0]
        self._data = ([link(0, 1, n), link(n, 0)] if self._grouped else
                      [link(a, b) for a, b in pairwise(ring)])
        self._control = [link(0, place) for place in ring[1:-1]]
        self._back = link(1, 0)  # V1's credits: a worker sends them before anything else
        # Taps go straight to D0, each stage's over its own port; the small reports do not queue behind them.
        self._taps = [link(place, 0) for place in ring[1:-1]]
        self._reports = [link(place, 0) for place in ring[1:-1]]
        share = devices.d0.model.layers / n
        self._stages = [
            VirtualStage(i + 1, clock, engine, seconds, share if self._grouped else devices.layers[i],
                         self._forward(i), self._finished(i), self._on_timing, spans)
            for i, (engine, seconds) in enumerate(
                zip(engines, devices.compute_seconds(parallelism), strict=True))
        ]

    def start(self, coordinator: Coordinator, on_tokens: OnTokens | None,
              done: Callable[[Result], None]) -> None:
        """A request arrives now; ``done`` gets its result."""
        opening = self._scheduler.add(coordinator)
        self._running[opening.session] = _Running(coordinator, on_tokens, done, self._clock.now,
                                                  [0] * len(self._stages))
        self._observer.opened(coordinator, self._clock.now)
        if self._observer.wants_times:
            self._timed.add(opening.session)
        if self._curve is not None and coordinator.strategy.wants_stage_times:
            self._learned.add(opening.session)
        for engine in self._engines:  # the Open arrives before the first segment in any case
            engine.open(opening)
        self._pump()

    def cancel(self, coordinator: Coordinator) -> None:
        if not coordinator.finished:
            coordinator.cancel()
            self._end(coordinator)
            self._pump()

    def expect(self, arrivals: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """Requests arrive at these times; each callable has to :meth:`start` one."""
        self._expected += len(arrivals)
        for at, start in arrivals:
            self._clock.at(at, partial(self._arrive, start))

    def _arrive(self, start: Callable[[], None]) -> None:
        self._expected -= 1
        start()

    def run(self) -> None:
        while (self._running or self._expected) and self._clock.step():
            pass
        if self._running:
            raise RuntimeError("virtual time stopped before the text was complete")
        if self._grouped:
            self._spread_spans()

    # ---- results ---------------------------------------------------------------------------

    def _end(self, coordinator: Coordinator) -> None:
        session = coordinator.builder.session
        running = self._running.pop(session)
        slot = self._devices.slot_seconds(coordinator.request.params.segment)
        total = running.bytes
        stats = [self._stage_stats(running, session, i) for i in range(len(self._stages))]
        if self._grouped:
            exchanged = sum(
                tensor_bytes(self._profile, self._parallelism, span.rows, self._count)
                for span in self._spans if span.device == 1 and span.session == session)
            total += exchanged
            stats = self._device_stats(stats[0], running, exchanged)
        closing = self._scheduler.remove(session)
        for index, link in enumerate(self._control):
            link.send(wire_bytes(closing, self._profile), partial(self._deliver_hint, index, closing))
        result = coordinator.result(slot, total, tuple(stats))
        self._observer.settled(coordinator, result, self._clock.now)
        running.done(result)

    def _spread_spans(self) -> None:
        """Copy the first device's spans to all devices of the group."""
        busy = [span for span in self._spans if span.device == 1]
        self._spans += [replace(span, device=i + 1) for i in range(1, self._count) for span in busy]

    def _device_stats(self, group: dict[str, float], running: _Running, exchanged: int
                      ) -> list[dict[str, float]]:
        handed_on = running.bytes_in / self._count  # token ids; the last device sends outputs
        bytes_out = [*[handed_on] * (self._count - 1), group["bytes_out"]]
        return [{**group, "bytes_out": own, "collective_bytes": exchanged / self._count}
                for own in bytes_out]

    def _stage_stats(self, running: _Running, session: int, index: int) -> dict[str, float]:
        work = self._stages[index].work[session]
        return {"compute_s": work.compute_s,
                "wait_s": self._clock.now - running.since - work.compute_s,
                "rows": work.rows, "segments": work.segments, "cancelled": work.cancelled,
                "bytes_out": running.bytes_out[index]}

    # ---- messages --------------------------------------------------------------------------

    def _send(self, link: VirtualLink, message: Message, session: int, deliver: Callable[[], None]) -> int:
        """Send over a link, charge the request, and return the message's bytes."""
        size = wire_bytes(message, self._profile)
        link.send(size, deliver)
        if session in self._running:
            self._running[session].bytes += size * link.hops
        return size

    def _send_data(self, link: VirtualLink, message: Segment | Output | Batch, deliver: Callable[[], None]
                   ) -> list[tuple[_Running, int]]:
        """Send over a data link; charge the requests of its parts, and return what each of them pays."""
        size, parts = wire_bytes(message, self._profile), parts_of(message)
        link.send(size, deliver)
        paid = [(self._running[part.session], share)
                for part, share in zip(parts, shares(size, parts), strict=True)
                if part.session in self._running]
        for running, share in paid:
            running.bytes += share * link.hops
        return paid

    def _forward(self, index: int) -> Callable[[Segment | Output | Batch | Tap], None]:
        def forward(message: Segment | Output | Batch | Tap) -> None:
            if isinstance(message, Tap):
                self._send(self._taps[index], message, message.session, partial(self._arrived, message))
                return
            outputs = [part for part in parts_of(message) if isinstance(part, Output)]
            if isinstance(message, Output) or outputs:
                deliver = partial(self._arrived, *outputs)
            else:
                deliver = partial(self._stages[index + 1].receive, message)
            for running, share in self._send_data(self._data[index + 1], message, deliver):
                running.bytes_out[index] += share

        return forward

    def _finished(self, index: int) -> Callable[[Segment], None]:
        def finished(segment: Segment) -> None:
            if index == 0:
                credit = Credit(segment.session, segment.epoch, segment.run)
                self._send(self._back, credit, segment.session, partial(self._arrived, credit))

        return finished

    def _on_timing(self, times: Computed) -> None:
        if times.session in self._timed and times.session in self._running:
            for stage in range(1, self._count + 1) if self._grouped else [times.stage]:
                self._observer.arrived(replace(times, stage=stage), self._clock.now)
        if times.session in self._learned:
            self._send(self._reports[times.stage - 1], times, times.session, partial(self._learn, times))

    def _learn(self, times: Computed) -> None:
        if self._curve is not None:
            self._curve.observe(times.stage, times.batch_rows, (times.end - times.start) * 1e-6)

    def _arrived(self, *messages: Output | Tap | Credit) -> None:
        for message in messages:
            self._observer.arrived(message, self._clock.now)
            self._scheduler.receive(message)
        self._pump()

    def _pump(self) -> None:
        if self._busy:
            return
        for message in self._scheduler.take_messages():
            self._dispatch(message)
        job = self._scheduler.next_job()
        if job is None:
            return
        for message in self._scheduler.take_ahead(job):
            self._dispatch(message)
        self._busy = True
        end = self._clock.now + self._devices.job_seconds(job)
        self._spans.append(self._span(job, end))
        start = self._clock.now
        self._clock.at(end, lambda: self._complete(job, start))

    def _dispatch(self, message: Segment | Batch | Prune | Cancel) -> None:
        if isinstance(message, Prune | Cancel):
            self._observer.sent(message, self._clock.now)
            for index, link in enumerate(self._control):
                self._send(link, message, message.session, partial(self._deliver_hint, index, message))
            return
        for part in parts_of(message):
            assert isinstance(part, Segment)
            self._observer.sent(part, self._clock.now)
        first = self._data[0]
        for running, share in self._send_data(first, message, partial(self._stages[0].receive, message)):
            running.bytes_in += share * first.hops

    def _deliver_hint(self, index: int, message: Prune | Cancel | Close) -> None:
        """Tensor-parallel devices ignore hints (the reason is in ``stage.tensor_engine``)."""
        if not self._grouped:
            self._stages[index].receive(message)

    def _complete(self, job: Job, start: float) -> None:
        self._busy = False
        self._scheduler.worked(job, self._clock.now - start)
        left = job.without([n for n in job.sessions if n not in self._running])  # cancelled meanwhile
        if left is not None:
            for _, error in left.complete():
                raise error
            self._observer.worked(left, start, self._clock.now)
        for coordinator, _ in left.parts if left else ():
            running = self._running[coordinator.builder.session]
            if running.on_tokens and (new := coordinator.new_tokens()):
                running.on_tokens(new)
            if coordinator.finished:
                self._end(coordinator)
        self._pump()

    def _span(self, job: Job, end: float) -> Span:
        """Named after the first request."""
        session, now = job.sessions[0], self._clock.now
        tasks = [task for _, task in job.parts]
        if isinstance(tasks[0], Verify):
            rows = sum(len(task.output.numbers) for task in tasks if isinstance(task, Verify))
            return Span(0, "verify", now, end, tasks[0].output.run, rows, session=session)
        nodes = sum(len(task.request.nodes) for task in tasks if isinstance(task, DraftPass))
        return Span(0, "draft", now, end, -1, nodes, session=session)
