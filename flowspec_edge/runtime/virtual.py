"""Virtual time: the whole cluster in one process, discrete events, durations from a profile.

The tokens come from the real models through the very objects that the processes run (coordinator,
strategies, stages); only time is made up: compute and links are charged as a profile says, with
the profile's hidden width and layers, not the loaded model's.  Two runs give the same figures to
the last digit.  Does not know strategies or trees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from flowspec_edge.config import Profile
from flowspec_edge.messages import Credit, Open, Output, Segment, Tap
from flowspec_edge.runtime.coordinator import Coordinator, Task, Verify
from flowspec_edge.runtime.device0 import DraftDevice
from flowspec_edge.runtime.events import Clock, Link, Span, wire_bytes
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.runtime.virtual_stage import VirtualStage
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard


class VirtualRun:
    """One request in virtual time."""

    def __init__(self, coordinator: Coordinator, engines: list[StageEngine], profile: Profile,
                 clock: Clock, on_tokens: OnTokens | None, spans: list[Span]) -> None:
        self._c = coordinator
        self._draft_kind = coordinator.strategy.drafts_with(coordinator.request.params)
        self._profile = profile
        self._clock = clock
        self._on_tokens = on_tokens
        self._spans = spans
        self._busy = False
        share = self._share = profile.model.layers / len(engines)
        self._data = [Link(clock, profile) for _ in range(len(engines) + 1)]
        self._control = [Link(clock, profile) for _ in engines]
        self._back = Link(clock, profile)  # control messages from the stages to D0
        self._stages = [
            VirtualStage(i + 1, clock, engine, partial(profile.stage_seconds, layers=share), share,
                         self._forward(i), self._finished(i), spans)
            for i, engine in enumerate(engines)
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
        slot = self._profile.stage_seconds(self._c.request.params.segment, self._share)
        total = sum(link.bytes for link in (*self._data, *self._control, self._back))
        return self._c.result(slot, total, tuple(self._stage_stats(i) for i in range(len(self._stages))))

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
                link = self._data[-1] if isinstance(message, Output) else self._back
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
            for link, stage in zip(self._control, self._stages, strict=True):
                link.send(size, partial(stage.receive, message))
        task = self._c.next_task()
        if task is not None:
            self._busy = True
            end = self._clock.now + self._cost(task)
            self._spans.append(self._span(task, end))
            self._clock.at(end, lambda: self._complete(task))

    def _complete(self, task: Task) -> None:
        self._busy = False
        self._c.complete(task)
        if self._on_tokens and (new := self._c.new_tokens()):
            self._on_tokens(new)
        if not self._c.finished:
            self._pump()

    def _cost(self, task: Task) -> float:
        p = self._profile
        if isinstance(task, Verify):
            rows = len(task.output.numbers)
            return (p.host.bookkeeping_ms + (p.lm_head.ms if rows else 0.0)) / 1e3
        assert self._draft_kind is not None
        return p.draft_seconds(self._draft_kind)

    def _span(self, task: Task, end: float) -> Span:
        if isinstance(task, Verify):
            output = task.output
            return Span(0, "verify", self._clock.now, end, output.run, len(output.numbers))
        return Span(0, "draft", self._clock.now, end, -1, len(task.request.nodes))


class VirtualCluster:
    """A cluster in virtual time under ``profile``; implements ``runtime.request.Cluster``."""

    clock = "virtual"
    spans: list[Span]  # who was busy when, in the newest request

    def __init__(self, model_dir: Path, stages: int, profile: Profile, dtype: str = "fp32") -> None:
        self.profile = profile
        self._device0 = DraftDevice(model_dir, dtype)
        self._engines = [
            StageEngine(load_shard(model_dir / "target", i, stages, dtype, allow_empty=True))
            for i in range(stages)
        ]
        self._session = 0
        self.spans = []

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request; raises UsageError when the request cannot fit."""
        self._session += 1
        clock = Clock()
        coordinator = self._device0.coordinator(
            request, len(self._engines), lambda: clock.now, self._session,
            lambda kind: self._latency(request.params.segment) / max(self.profile.draft_seconds(kind), 1e-9))
        self.spans = []
        return VirtualRun(coordinator, self._engines, self.profile, clock, on_tokens, self.spans).run()

    def _latency(self, rows: int) -> float:
        """Seconds that a segment of ``rows`` rows takes from D0 through all stages to its tokens."""
        p, stages = self.profile, len(self._engines)
        values = rows * p.model.hidden_width * p.model.bytes_per_value
        hop = sum(p.link_seconds(values))
        compute = p.stage_seconds(rows, p.model.layers)
        return compute + stages * hop + (p.lm_head.ms + p.host.bookkeeping_ms) / 1e3

    def close(self) -> None:
        """Nothing is held but memory."""
