"""Virtual time: the whole cluster in one process, discrete events, durations from a profile.

The tokens come from the real models through the very objects that the processes run (coordinator,
strategies, stages); only time is made up: compute and links are charged as a profile says, with
the profile's hidden width and layers, not the loaded model's; the devices may differ
(``runtime.devices``).  Two runs give the same figures to
the last digit.  Does not know strategies or trees.

Tensor-parallel devices do the same work at the same moment, so they are one stage here, with an
engine that holds all layers and a cost that counts the devices (``runtime.collectives``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from flowspec_edge.config import Profile
from flowspec_edge.messages import Cancel, Credit, Open, Output, Prune, Segment, Tap
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.collectives import tensor_bytes
from flowspec_edge.runtime.coordinator import Coordinator, Task, Verify
from flowspec_edge.runtime.device0 import DraftDevice
from flowspec_edge.runtime.devices import Devices
from flowspec_edge.runtime.events import Clock, Link, Span, wire_bytes
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.runtime.virtual_stage import VirtualStage
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.strategies.registry import strategy_class


class VirtualRun:
    """One request in virtual time."""

    def __init__(self, coordinator: Coordinator, engines: list[StageEngine], devices: Devices,
                 clock: Clock, on_tokens: OnTokens | None, spans: list[Span]) -> None:
        """``engines``: one a device, or one for all of a tensor-parallel group."""
        self._c = coordinator
        self._devices = devices
        self._profile = devices.d0  # whose bytes are those of all
        self._clock = clock
        self._on_tokens = on_tokens
        self._spans = spans
        self._busy = False
        n = self._count = len(devices.stages)
        self._parallelism = coordinator.strategy.parallelism
        self._grouped = self._parallelism != "pipeline"

        def link(sender: int, receiver: int, hops: int = 1) -> Link:
            return Link(clock, partial(devices.hop_seconds, sender, receiver), hops)

        # Every device of a group gets the token ids from the one before; the last one has the outputs.
        ring = [0, *range(1, n + 1), 0]
        self._data = ([link(0, 1, n), link(n, 0)] if self._grouped else
                      [link(a, b) for a, b in pairwise(ring)])
        self._control = [link(0, place) for place in ring[1:-1]]
        self._back = link(1, 0)  # V1's credits: a worker sends them before anything else
        # Taps go straight to D0, each stage's over its own port.
        self._taps = [link(place, 0) for place in ring[1:-1]]
        share = devices.d0.model.layers / n
        self._stages = [
            VirtualStage(i + 1, clock, engine, seconds, share if self._grouped else devices.layers[i],
                         self._forward(i), self._finished(i), spans)
            for i, (engine, seconds) in enumerate(
                zip(engines, devices.compute_seconds(self._parallelism), strict=True))
        ]
        opening: Open = coordinator.open_message()
        for engine in engines:
            engine.open(opening)

    def run(self) -> Result:
        """To the end of the text."""
        self._pump()
        while not self._c.finished and self._clock.step():
            pass
        if not self._c.finished:
            raise RuntimeError("virtual time stopped before the text was complete")
        slot = self._devices.slot_seconds(self._c.request.params.segment)
        total = sum(link.bytes for link in (*self._data, *self._control, *self._taps, self._back))
        stats = [self._stage_stats(i) for i in range(len(self._stages))]
        if self._grouped:
            exchanged = self._spread_spans()
            total += exchanged
            stats = self._device_stats(stats[0], exchanged)
        return self._c.result(slot, total, tuple(stats))

    def _spread_spans(self) -> int:
        """Show all devices of a group as busy; returns the bytes that they sent one another."""
        busy = [span for span in self._spans if span.device == 1]
        self._spans += [replace(span, device=i + 1) for i in range(1, self._count) for span in busy]
        return sum(tensor_bytes(self._profile, self._parallelism, span.rows, self._count) for span in busy)

    def _device_stats(self, group: dict[str, float], exchanged: int) -> list[dict[str, float]]:
        """A group's figures for each of its devices."""
        handed_on = self._data[0].bytes / self._count  # token ids; the last device sends outputs
        bytes_out = [*[handed_on] * (self._count - 1), group["bytes_out"]]
        return [{**group, "bytes_out": own, "collective_bytes": exchanged / self._count}
                for own in bytes_out]

    def _stage_stats(self, index: int) -> dict[str, float]:
        stage = self._stages[index]
        return {"compute_s": stage.compute_s, "wait_s": self._clock.now - stage.compute_s,
                "rows": stage.rows, "segments": stage.segments, "cancelled": stage.cancelled,
                "bytes_out": self._data[index + 1].bytes}

    def _forward(self, index: int) -> Callable[[Segment | Output | Tap], None]:
        """How stage ``index`` passes on what it computed."""

        def forward(message: Segment | Output | Tap) -> None:
            size = wire_bytes(message, self._profile)
            if isinstance(message, Segment):
                following = self._stages[index + 1]
                self._data[index + 1].send(size, partial(following.receive, message))
            else:
                link = self._data[-1] if isinstance(message, Output) else self._taps[index]
                link.send(size, partial(self._arrived, message))

        return forward

    def _finished(self, index: int) -> Callable[[int], None]:
        """V1 tells D0 that it has room; the others keep it to themselves."""

        def finished(run: int) -> None:
            if index == 0:
                ledger = self._c.ledger
                credit = Credit(ledger.session, ledger.epoch, run)
                self._back.send(wire_bytes(credit, self._profile), partial(self._arrived, credit))

        return finished

    def _arrived(self, message: Output | Tap | Credit) -> None:
        self._c.receive(message)
        self._pump()

    def _pump(self) -> None:
        """D0, when it is not busy: send what may be sent, then start the most urgent work."""
        if self._busy:
            return
        for message in self._c.take_messages():
            size = wire_bytes(message, self._profile)
            if isinstance(message, Segment):
                self._data[0].send(size, partial(self._stages[0].receive, message))
                continue
            for index, link in enumerate(self._control):
                link.send(size, partial(self._advise, index, message))
        task = self._c.next_task()
        if task is not None:
            self._busy = True
            end = self._clock.now + self._devices.task_seconds(self._c, task)
            self._spans.append(self._span(task, end))
            self._clock.at(end, lambda: self._complete(task))

    def _advise(self, index: int, message: Prune | Cancel) -> None:
        """A hint has arrived; tensor-parallel devices ignore it (``stage.tensor_engine`` says why)."""
        if not self._grouped:
            self._stages[index].receive(message)

    def _complete(self, task: Task) -> None:
        self._busy = False
        self._c.complete(task)
        if self._on_tokens and (new := self._c.new_tokens()):
            self._on_tokens(new)
        if not self._c.finished:
            self._pump()

    def _span(self, task: Task, end: float) -> Span:
        if isinstance(task, Verify):
            output = task.output
            return Span(0, "verify", self._clock.now, end, output.run, len(output.numbers))
        return Span(0, "draft", self._clock.now, end, -1, len(task.request.nodes))


class VirtualCluster:
    """A cluster in virtual time; implements ``runtime.request.Cluster``.

    Under a profile the devices are alike and share the layers of its model evenly.
    """

    clock = "virtual"
    spans: list[Span]  # who was busy when, in the newest request

    def __init__(self, model_dir: Path, stages: int, profile: Profile | Devices, dtype: str = "fp32") -> None:
        self.devices = profile if isinstance(profile, Devices) else Devices.even(profile, stages)
        self._device0 = DraftDevice(model_dir, dtype)
        self._stages = stages
        self._target, self._dtype = ModelDir(model_dir).stages, dtype
        self._engines: dict[int, list[StageEngine]] = {}  # by how many the model is cut into
        self._session = 0
        self.spans = []
        self._cut(stages)

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request; raises UsageError when the request cannot fit."""
        self._session += 1
        clock = Clock()
        parallelism = strategy_class(request.strategy).parallelism
        latency = self.devices.latency_seconds(request.params.segment, parallelism)
        coordinator = self._device0.coordinator(
            request, self._stages, lambda: clock.now, self._session,
            lambda kind: latency / max(self.devices.d0.draft_seconds(kind), 1e-9))
        self.spans = []
        engines = self._cut(self._stages if parallelism == "pipeline" else 1)
        return VirtualRun(coordinator, engines, self.devices, clock, on_tokens, self.spans).run()

    def _cut(self, stages: int) -> list[StageEngine]:
        """The model in so many pieces; loaded when first wanted, and kept."""
        if stages not in self._engines:
            self._engines[stages] = [
                StageEngine(load_shard(self._target, i, stages, self._dtype, allow_empty=True))
                for i in range(stages)
            ]
        return self._engines[stages]

    def close(self) -> None:
        """Nothing is held but memory."""
