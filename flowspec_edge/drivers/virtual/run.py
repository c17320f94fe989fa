"""One run in virtual time: D0, the stages and their links as discrete events.

D0's core and the stage engines are those of the real processes; only durations are simulated. The devices of
a group that shares every layer work in lockstep, so one stage with all layers stands for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from flowspec_edge.d0.core import DraftCore
from flowspec_edge.d0.events import (
    Compute,
    Finish,
    Learned,
    Outgoing,
    Reported,
    Send,
    Shown,
    Wait,
    Worked,
)
from flowspec_edge.d0.jobs import Job
from flowspec_edge.d0.request import RequestHandle
from flowspec_edge.d0.session import DraftPass, Verify
from flowspec_edge.drivers.virtual.clock import EventClock, Span
from flowspec_edge.drivers.virtual.devices import Devices, tensor_bytes
from flowspec_edge.drivers.virtual.links import VirtualLink, wire_bytes
from flowspec_edge.drivers.virtual.stage import VirtualStage
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
    parts_of,
    shares,
)
from flowspec_edge.stage.core import Outgoing as StageOutgoing
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.strategies.base import Parallelism


@dataclass(eq=False)
class _Traffic:
    """The traffic of an open session, in bytes."""

    since: float
    out: list[int]  # by stage, on its data link
    to_first: int = 0  # on D0's data link


class VirtualRun:
    """Runs requests until none is left."""

    def __init__(self, core: DraftCore, engines: list[StageEngine], devices: Devices,
                 parallelism: Parallelism, clock: EventClock, spans: list[Span]) -> None:
        """Set up a run; ``engines``: one per device, or one for a tensor-parallel group."""
        self._core = core
        self._learned: set[int] = set()  # sessions whose reports have bytes; those for an observer are free
        self._open: dict[int, _Traffic] = {}
        self._devices = devices
        self._profile = devices.d0  # all devices have the same model
        self._clock = clock
        self._spans = spans
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
        self._control = [link(0, stage) for stage in ring[1:-1]]
        self._back = link(1, 0)  # V1's credits: a worker sends them before anything else
        # Taps go straight to D0, each stage's over its own port; the small reports do not queue behind them.
        self._taps = [link(stage, 0) for stage in ring[1:-1]]
        self._reports = [link(stage, 0) for stage in ring[1:-1]]
        share = devices.d0.model.layers / n
        self._stages = [
            VirtualStage(i + 1, clock, engine, seconds, share if self._grouped else devices.layers[i],
                         partial(self._from_stage, i), spans)
            for i, (engine, seconds) in enumerate(
                zip(engines, devices.compute_seconds(parallelism), strict=True))
        ]

    def start(self, handle: RequestHandle) -> None:
        """Let a request arrive now.

        What keeps it from running is raised.
        """
        self._core.queue.put(handle)
        self._pump()
        if handle.done():
            handle.result()

    def cancel(self, handle: RequestHandle) -> None:
        if handle.cancel():
            self._pump()

    def expect(self, arrivals: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """Let requests arrive at these times; each callable has to :meth:`start` one."""
        self._expected += len(arrivals)
        for at, start in arrivals:
            self._clock.at(at, partial(self._arrive, start))

    def _arrive(self, start: Callable[[], None]) -> None:
        self._expected -= 1
        start()

    def run(self) -> None:
        pumped = False
        while self._core.busy or self._expected:
            if self._clock.step():
                pumped = False
            elif pumped:
                break
            else:  # nothing is under way: a strategy is asked a second time before its request fails
                self._pump()
                pumped = True
        if self._core.busy:
            raise RuntimeError("virtual time stopped before the text was complete")
        if self._grouped:
            self._spread_spans()

    # ---- D0 --------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Do what the core says until it waits.

        What is fed meanwhile may pump, too: a request that is answered may make way for another one.
        """
        while not isinstance(action := self._core.next(), Wait):
            match action:
                case Send(messages):
                    self._send(messages)
                case Compute():
                    end = self._clock.now + self._devices.job_seconds(action.job)
                    self._spans.append(self._span(action.job, end))
                    self._clock.at(end, partial(self._complete, action, self._clock.now))
                case Finish():
                    raise AssertionError("the figures of virtual stages come with the Close")

    def _complete(self, run: Compute, start: float) -> None:
        run.work()
        self._core.feed(Worked(start, self._clock.now))
        self._pump()

    def _send(self, messages: Iterable[Outgoing]) -> None:
        for message in messages:
            match message:
                case Open():
                    self._begin(message)
                case Close():
                    self._end(message)
                case Prune() | Cancel():
                    for index, link in enumerate(self._control):
                        self._send_over(link, message, partial(self._deliver_hint, index, message))
                case Segment() | Batch():
                    for session, share in self._send_data(
                            self._data[0], message, partial(self._stages[0].receive, message)):
                        self._core.charge(session, share)
                        if session in self._open:
                            self._open[session].to_first += share

    def _begin(self, opening: Open) -> None:
        active = self._core.find(opening.session)
        if active and active.learned:
            self._learned.add(opening.session)
        self._open[opening.session] = _Traffic(self._clock.now, [0] * len(self._stages))
        for stage in self._stages:  # the Open arrives before the first segment in any case
            stage.receive(opening)

    def _end(self, closing: Close) -> None:
        """Close a session; the core gets the stages' figures as they are now."""
        traffic = self._open.pop(closing.session)
        stats = [self._stage_stats(traffic, closing.session, i) for i in range(len(self._stages))]
        if self._grouped:
            exchanged = sum(
                tensor_bytes(self._profile, self._parallelism, span.rows, self._count)
                for span in self._spans if span.device == 1 and span.session == closing.session)
            outs = [*[float(traffic.to_first)] * (self._count - 1), stats[0]["bytes_out"]]
            stats = [{**stats[0], "bytes_out": out, "collective_bytes": exchanged / self._count}
                     for out in outs]
        for index, link in enumerate(self._control):
            link.send(wire_bytes(closing, self._profile), partial(self._deliver_hint, index, closing))
        active = self._core.find(closing.session)
        if active is not None:  # else it failed
            segment = active.handle.request.params.segment
            self._core.feed(Reported(closing.session, stats, self._devices.slot_seconds(segment)))

    def _stage_stats(self, traffic: _Traffic, session: int, index: int) -> dict[str, float]:
        work = self._stages[index].work(session)
        counters = self._stages[index].core.engine.counters_of(session)
        experts = {name: counters[name] for name in ("experts", "experts_independent") if counters[name]}
        return {"compute_s": work.compute_s,
                "wait_s": self._clock.now - traffic.since - work.compute_s,
                "rows": work.rows, "segments": work.segments, "cancelled": work.cancelled,
                "bytes_out": traffic.out[index], **experts}

    def _spread_spans(self) -> None:
        """Copy the first device's spans to all devices of the group."""
        busy = [span for span in self._spans if span.device == 1]
        self._spans += [replace(span, device=i + 1) for i in range(1, self._count) for span in busy]

    def _span(self, job: Job, end: float) -> Span:
        """Named after the first request."""
        session, now = job.sessions[0], self._clock.now
        tasks = [task for _, task in job.parts]
        if isinstance(tasks[0], Verify):
            rows = sum(len(task.output.numbers) for task in tasks if isinstance(task, Verify))
            return Span(0, "verify", now, end, tasks[0].output.run, rows, session=session)
        nodes = sum(len(task.request.nodes) for task in tasks if isinstance(task, DraftPass))
        return Span(0, "draft", now, end, -1, nodes, session=session)

    # ---- links -----------------------------------------------------------------------------

    def _send_over(self, link: VirtualLink, message: Tap | Credit | Computed | Prune | Cancel,
                   deliver: Callable[[], None]) -> None:
        """Send over a link, and charge the request."""
        size = wire_bytes(message, self._profile)
        link.send(size, deliver)
        self._core.charge(message.session, size)

    def _send_data(self, link: VirtualLink, message: Segment | Output | Batch, deliver: Callable[[], None]
                   ) -> list[tuple[int, int]]:
        """Send over a data link; return the sessions of its parts and what each of them pays."""
        size, parts = wire_bytes(message, self._profile), parts_of(message)
        link.send(size, deliver)
        return [(part.session, share) for part, share in zip(parts, shares(size, parts), strict=True)]

    def _from_stage(self, index: int, message: StageOutgoing) -> None:
        match message:
            case Credit():
                self._send_over(self._back, message, partial(self._arrived, message))
            case Tap():
                self._send_over(self._taps[index], message, partial(self._arrived, message))
            case Computed():
                self._on_timing(message)
            case Segment() | Output() | Batch():
                parts = parts_of(message)
                outputs = [part for part in parts if isinstance(part, Output)]
                if isinstance(message, Segment) or (isinstance(message, Batch) and len(outputs) < len(parts)):
                    deliver = partial(self._stages[index + 1].receive, message)
                else:
                    deliver = partial(self._arrived, *outputs)
                for session, share in self._send_data(self._data[index + 1], message, deliver):
                    if session in self._open:
                        self._open[session].out[index] += share

    def _on_timing(self, times: Computed) -> None:
        active = self._core.find(times.session)
        if active and active.watched:
            for stage in range(1, self._count + 1) if self._grouped else [times.stage]:
                self._core.feed(Shown(replace(times, stage=stage)))
        if times.session in self._learned:
            self._send_over(self._reports[times.stage - 1], times, partial(self._core.feed, Learned(times)))

    def _arrived(self, *messages: Output | Tap | Credit) -> None:
        for message in messages:
            self._core.feed(message)
        self._pump()

    def _deliver_hint(self, index: int, message: Prune | Cancel | Close) -> None:
        """Deliver a hint to a stage, but not to a group.

        The devices of a group would see the hint between different segments, and then compute different rows.
        """
        if not self._grouped:
            self._stages[index].receive(message)
