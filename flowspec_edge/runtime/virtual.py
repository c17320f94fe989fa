"""Virtual time: the whole cluster in one process, discrete events, durations from a profile.

The tokens come from the real models through the very objects that the processes run (coordinator,
strategies, stages); only time is made up: compute and links are charged as a profile says, with
the profile's hidden width and layers, not the loaded model's; the devices may differ
(``runtime.devices``).  Two runs give the same figures to the last digit.  Does not know strategies
or trees, nor whose turn it is (``runtime.sessions``).

Tensor-parallel devices do the same work at the same moment, so they are one stage here, with an
engine that holds all layers and a cost that counts the devices (``runtime.collectives``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

from flowspec_edge.config import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.messages import Cancel, Close, Computed, Credit, Message, Output, Prune, Segment, Tap
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.collectives import tensor_bytes
from flowspec_edge.runtime.coordinator import Coordinator, Verify
from flowspec_edge.runtime.device0 import DraftDevice
from flowspec_edge.runtime.devices import Devices
from flowspec_edge.runtime.events import Clock, Link, Span, wire_bytes
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.runtime.sessions import Job, Sessions
from flowspec_edge.runtime.slot_curve import WARM_UP_ROWS, SlotCurve
from flowspec_edge.runtime.virtual_stage import VirtualStage
from flowspec_edge.runtime.virtual_weights import Weights
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.registry import strategy_class


@dataclass(eq=False)
class _Running:
    """A request that is being answered."""

    coordinator: Coordinator
    on_tokens: OnTokens | None
    done: Callable[[Result], None]
    since: float
    bytes_out: list[int]  # what each stage sent for it, over its data link
    bytes: int = 0  # on all links
    bytes_in: int = 0  # to V1, over the data link; to all devices of a group


class VirtualRun:
    """Requests in virtual time, from the first one's start until none is left."""

    def __init__(self, engines: list[StageEngine], devices: Devices, parallelism: Parallelism,
                 clock: Clock, spans: list[Span], observer: Observer, curve: SlotCurve | None = None
                 ) -> None:
        """``engines``: one a device, or one for all of a tensor-parallel group; ``curve`` learns from the
        stages' reports, which are charged then."""
        self._observer = observer
        self._curve = curve
        self._timed: set[int] = set()  # sessions whose segments' times the observer wants; they cost nothing
        self._learned: set[int] = set()  # sessions whose segments' times go into the curve
        self._sessions = Sessions(clock=lambda: clock.now)
        self._running: dict[int, _Running] = {}
        self._engines = engines
        self._devices = devices
        self._profile = devices.d0  # whose bytes are those of all
        self._clock = clock
        self._spans = spans
        self._busy = False
        self._expected = 0  # requests that have not come in
        n = self._count = len(devices.stages)
        self._parallelism = parallelism
        self._grouped = parallelism != "pipeline"

        def link(sender: int, receiver: int, hops: int = 1) -> Link:
            return Link(clock, partial(devices.hop_seconds, sender, receiver), hops)

        # Every device of a group gets the token ids from the one before; the last one has the outputs.
        ring = [0, *range(1, n + 1), 0]
        self._data = ([link(0, 1, n), link(n, 0)] if self._grouped else
                      [link(a, b) for a, b in pairwise(ring)])
        self._control = [link(0, place) for place in ring[1:-1]]
        self._back = link(1, 0)  # V1's credits: a worker sends them before anything else
        # Taps go straight to D0, each stage's over its own port; reports, which are small, wait for none.
        self._taps = [link(place, 0) for place in ring[1:-1]]
        self._reports = [link(place, 0) for place in ring[1:-1]]
        share = devices.d0.model.layers / n
        self._stages = [
            VirtualStage(i + 1, clock, engine, seconds, share if self._grouped else devices.layers[i],
                         self._forward(i), self._finished(i), self._told, spans)
            for i, (engine, seconds) in enumerate(
                zip(engines, devices.compute_seconds(parallelism), strict=True))
        ]

    def start(self, coordinator: Coordinator, on_tokens: OnTokens | None,
              done: Callable[[Result], None]) -> None:
        """A request comes in now; ``done`` is called with what comes of it."""
        opening = self._sessions.add(coordinator)
        self._running[opening.session] = _Running(coordinator, on_tokens, done, self._clock.now,
                                                  [0] * len(self._stages))
        self._observer.opened(coordinator, self._clock.now)
        if self._observer.wants_times:
            self._timed.add(opening.session)
        if self._curve is not None and coordinator.strategy.learns_slot:
            self._learned.add(opening.session)
        for engine in self._engines:  # over the control links it would be there with the first segment
            engine.open(opening)
        self._pump()

    def cancel(self, coordinator: Coordinator) -> None:
        """Whoever asked for this goes away now."""
        if not coordinator.finished:
            coordinator.cancel()
            self._end(coordinator)
            self._pump()

    def expect(self, arrivals: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """Requests come in at these times; each call is to :meth:`start` one."""
        self._expected += len(arrivals)
        for at, start in arrivals:
            self._clock.at(at, partial(self._arrive, start))

    def _arrive(self, start: Callable[[], None]) -> None:
        self._expected -= 1
        start()

    def run(self) -> None:
        """To the end of the last text."""
        while (self._running or self._expected) and self._clock.step():
            pass
        if self._running:
            raise RuntimeError("virtual time stopped before the text was complete")
        if self._grouped:
            self._spread_spans()

    # ---- what comes of a request -----------------------------------------------------------

    def _end(self, coordinator: Coordinator) -> None:
        session = coordinator.ledger.session
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
        closing = self._sessions.remove(session)
        for index, link in enumerate(self._control):
            link.send(wire_bytes(closing, self._profile), partial(self._advise, index, closing))
        result = coordinator.result(slot, total, tuple(stats))
        self._observer.settled(coordinator, result, self._clock.now)
        running.done(result)

    def _spread_spans(self) -> None:
        """Show all devices of a group as busy."""
        busy = [span for span in self._spans if span.device == 1]
        self._spans += [replace(span, device=i + 1) for i in range(1, self._count) for span in busy]

    def _device_stats(self, group: dict[str, float], running: _Running, exchanged: int
                      ) -> list[dict[str, float]]:
        """A group's figures for each of its devices."""
        handed_on = running.bytes_in / self._count  # token ids; the last device sends outputs
        bytes_out = [*[handed_on] * (self._count - 1), group["bytes_out"]]
        return [{**group, "bytes_out": own, "collective_bytes": exchanged / self._count}
                for own in bytes_out]

    def _stage_stats(self, running: _Running, session: int, index: int) -> dict[str, float]:
        share = self._stages[index].shares[session]
        return {"compute_s": share.compute_s,
                "wait_s": self._clock.now - running.since - share.compute_s,
                "rows": share.rows, "segments": share.segments, "cancelled": share.cancelled,
                "bytes_out": running.bytes_out[index]}

    # ---- messages --------------------------------------------------------------------------

    def _send(self, link: Link, message: Message, session: int, deliver: Callable[[], None]) -> int:
        """Over a link, and into the request's books; the bytes that it weighs."""
        size = wire_bytes(message, self._profile)
        link.send(size, deliver)
        if session in self._running:
            self._running[session].bytes += size * link.hops
        return size

    def _forward(self, index: int) -> Callable[[Segment | Output | Tap], None]:
        """How stage ``index`` passes on what it computed."""

        def forward(message: Segment | Output | Tap) -> None:
            if isinstance(message, Tap):
                self._send(self._taps[index], message, message.session, partial(self._arrived, message))
                return
            deliver = (partial(self._stages[index + 1].receive, message) if isinstance(message, Segment)
                       else partial(self._arrived, message))
            size = self._send(self._data[index + 1], message, message.session, deliver)
            if message.session in self._running:
                self._running[message.session].bytes_out[index] += size

        return forward

    def _finished(self, index: int) -> Callable[[Segment], None]:
        """V1 tells D0 that it has room; the others keep it to themselves."""

        def finished(segment: Segment) -> None:
            if index == 0:
                credit = Credit(segment.session, segment.epoch, segment.run)
                self._send(self._back, credit, segment.session, partial(self._arrived, credit))

        return finished

    def _told(self, times: Computed) -> None:
        """A stage is done with a segment; all devices of a group are, at the same moment."""
        if times.session in self._timed and times.session in self._running:
            for stage in range(1, self._count + 1) if self._grouped else [times.stage]:
                self._observer.arrived(replace(times, stage=stage), self._clock.now)
        if times.session in self._learned:
            self._send(self._reports[times.stage - 1], times, times.session, partial(self._learn, times))

    def _learn(self, times: Computed) -> None:
        """A stage's report has come to D0."""
        if self._curve is not None:
            self._curve.observe(times.stage, times.rows, (times.end - times.start) * 1e-6)

    def _arrived(self, message: Output | Tap | Credit) -> None:
        self._observer.arrived(message, self._clock.now)
        self._sessions.receive(message)
        self._pump()

    def _pump(self) -> None:
        """D0, when it is not busy: send what may be sent, then start the most urgent work."""
        if self._busy:
            return
        for message in self._sessions.take_messages():
            self._dispatch(message)
        job = self._sessions.next_job()
        if job is None:
            return
        for segment in self._sessions.take_ahead(job):
            self._dispatch(segment)
        self._busy = True
        end = self._clock.now + self._devices.task_seconds(job.coordinator, job.task)
        self._spans.append(self._span(job, end))
        start = self._clock.now
        self._clock.at(end, lambda: self._complete(job, start))

    def _dispatch(self, message: Segment | Prune | Cancel) -> None:
        """D0 sends: segments to V1, all else to every stage."""
        self._observer.sent(message, self._clock.now)
        if isinstance(message, Segment):
            first = self._data[0]
            size = self._send(first, message, message.session, partial(self._stages[0].receive, message))
            self._running[message.session].bytes_in += size * first.hops
            return
        for index, link in enumerate(self._control):
            self._send(link, message, message.session, partial(self._advise, index, message))

    def _advise(self, index: int, message: Prune | Cancel | Close) -> None:
        """A hint has arrived; tensor-parallel devices ignore it (``stage.tensor_engine`` says why)."""
        if not self._grouped:
            self._stages[index].receive(message)

    def _complete(self, job: Job, start: float) -> None:
        self._busy = False
        self._sessions.worked(job, self._clock.now - start)
        coordinator = job.coordinator
        running = self._running.get(coordinator.ledger.session)
        if running is not None:  # it may have been cancelled meanwhile
            coordinator.complete(job.task)
            self._observer.worked(job, start, self._clock.now)
            if running.on_tokens and (new := coordinator.new_tokens()):
                running.on_tokens(new)
            if coordinator.finished:
                self._end(coordinator)
        self._pump()

    def _span(self, job: Job, end: float) -> Span:
        session, now = job.coordinator.ledger.session, self._clock.now
        if isinstance(job.task, Verify):
            output = job.task.output
            return Span(0, "verify", now, end, output.run, len(output.numbers), session=session)
        return Span(0, "draft", now, end, -1, len(job.task.request.nodes), session=session)


class VirtualCluster:
    """A cluster in virtual time; implements ``runtime.request.Cluster``.

    Under a profile the devices are alike and share the layers of its model evenly.
    """

    clock = "virtual"
    spans: list[Span]  # who was busy when, in the newest run

    def __init__(self, model_dir: Path, stages: int, profile: Profile | Devices, dtype: str = "fp32",
                 observer: Observer | None = None, *, device: str = "cpu", learn: bool = False) -> None:
        """``observer`` is told what happens, in virtual time.

        device  torch's: it holds the weights of D0, and those of the stages once
        learn   D0 is not told how long segments take by their rows; it learns that from the stages'
                reports, over all requests, and begins with what a warm-up shows (``runtime.slot_curve``)
        """
        self.devices = profile if isinstance(profile, Devices) else Devices.even(profile, stages)
        self._device0 = DraftDevice(model_dir, dtype, device)
        self._stages = stages
        self._observer = observer or Observer()
        self._weights = Weights(ModelDir(model_dir).stages, dtype, device)
        self._curve = self._warm_curve() if learn else None
        self._engines: dict[int, list[StageEngine]] = {}  # by how many the model is cut into
        self._session = 0
        self.spans = []
        self._cut(stages)

    def under(self, profile: Profile | Devices, stages: int) -> VirtualCluster:
        """Another cluster with the weights of this one, which is not to be used any more."""
        other = copy(self)
        other.devices = profile if isinstance(profile, Devices) else Devices.even(profile, stages)
        other._stages = stages
        other._curve = other._warm_curve() if self._curve else None
        other._engines = {n: engines for n, engines in self._engines.items() if n in (1, stages)}
        other._cut(stages)
        return other

    def _warm_curve(self) -> SlotCurve:
        """What the warm-up of a cluster of processes shows of stages like these."""
        curve = SlotCurve()
        curve.link_row_s = self.devices.link_row_seconds()
        for place, rows in product(range(1, self._stages + 1), WARM_UP_ROWS):
            curve.observe(place, rows, self.devices.stage_seconds(place, rows))
        return curve

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request; raises UsageError when the request cannot fit."""
        return self.generate_many([request], on_tokens=[on_tokens])[0]

    def generate_many(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None, *,
                      leaves: Sequence[float | None] | None = None,
                      follows: Sequence[int | None] | None = None,
                      on_tokens: Sequence[OnTokens | None] | None = None) -> list[Result]:
        """Run requests beside one another; the results in their order.

        arrivals   when each comes in, in virtual seconds; all at once by default
        leaves     when whoever asked goes away, if they do; the result is what there is until then
        follows    the place of the request upon whose answer each comes in, instead of at a time of its own
        on_tokens  what to call with new tokens, for each

        UsageError when one of them cannot fit, or when they want the model cut in different ways.
        """
        chosen = {strategy_class(request.strategy).parallelism for request in requests}
        if len(chosen) > 1:
            raise UsageError("requests beside one another must share one way of cutting the model, "
                             f"not {' and '.join(sorted(chosen))}")
        [parallelism] = chosen or {"pipeline"}
        clock = Clock()
        self.spans = []
        engines = self._cut(self._stages if parallelism == "pipeline" else 1)
        run = VirtualRun(engines, self.devices, parallelism, clock, self.spans, self._observer,
                         self._curve)
        results: dict[int, Result] = {}

        def start(place: int) -> None:
            coordinator = self._coordinator(requests[place], parallelism, clock)
            if leaves and (leave := leaves[place]) is not None:
                clock.at(max(leave, clock.now), lambda: run.cancel(coordinator))
            listener = on_tokens[place] if on_tokens else None
            run.start(coordinator, listener, partial(done, place))

        def done(place: int, result: Result) -> None:
            results[place] = result
            for following in [other for other, first in enumerate(follows or ()) if first == place]:
                start(following)

        order = sorted((place for place in range(len(requests)) if not follows or follows[place] is None),
                       key=lambda place: arrivals[place] if arrivals else 0.0)
        run.expect([(arrivals[place] if arrivals else 0.0, partial(start, place)) for place in order])
        run.run()
        return [results[place] for place in range(len(requests))]

    def _coordinator(self, request: Request, parallelism: Parallelism, clock: Clock) -> Coordinator:
        self._session += 1
        latency = self.devices.latency_seconds(request.params.segment, parallelism)
        return self._device0.coordinator(
            request, self._stages, lambda: clock.now, self._session,
            lambda kind: latency / max(self.devices.d0.draft_seconds(kind), 1e-9),
            self._curve.seconds if self._curve else self.devices.occupied_seconds)

    def _cut(self, stages: int) -> list[StageEngine]:
        """The model in so many pieces, each with its caches; made when first wanted, and kept."""
        if stages not in self._engines:
            self._engines[stages] = [StageEngine(shard) for shard in self._weights.shards(stages)]
        return self._engines[stages]

    def close(self) -> None:
        """Nothing is held but memory."""
