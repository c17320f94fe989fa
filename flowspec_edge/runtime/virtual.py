"""Virtual time: the whole cluster in one process, discrete events, durations from a profile.

The tokens come from the real models through the very objects that the processes run (coordinator,
strategies, stages); only time is made up: compute and links are charged as a profile says, with
the profile's hidden width and layers, not the loaded model's.  Two runs give the same figures to
the last digit.  Does not know strategies or trees.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flowspec_edge.config import Profile
from flowspec_edge.messages import Cancel, Credit, Message, Open, Output, Payload, Prune, Segment, Tap
from flowspec_edge.runtime.coordinator import Coordinator, Task, Verify
from flowspec_edge.runtime.device0 import DraftDevice
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.transport.codec import encode


class Clock:
    """Events in order of time, then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Run ``event`` when the clock reaches ``time`` (seconds)."""
        heapq.heappush(self._events, (time, self._made, event))
        self._made += 1

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass
class Link:
    """One direction between two devices: one message at a time occupies it, in order."""

    clock: Clock
    profile: Profile
    free_at: float = 0.0
    bytes: int = 0

    def send(self, size: int, deliver: Callable[[], None]) -> None:
        """``deliver`` runs when the last of ``size`` bytes has arrived."""
        occupied, latency = self.profile.link_seconds(size)
        self.free_at = max(self.free_at, self.clock.now) + occupied
        self.bytes += size
        self.clock.at(self.free_at + latency, deliver)


def wire_bytes(message: Message, profile: Profile) -> int:
    """What a message weighs on the wire with the profile's hidden width and element size."""
    size = sum(len(frame) for frame in encode(message))
    hidden: Payload | None = getattr(message, "hidden", None)
    if hidden is not None:
        values = len(hidden.array) * profile.model.hidden_width
        size += round(values * profile.model.bytes_per_value) - hidden.array.nbytes
    return size


@dataclass
class VirtualStage:
    """One verification device: a queue in front of a stage engine that takes the profile's time."""

    clock: Clock
    profile: Profile
    engine: StageEngine
    layers: float  # of the profile's model, may be a fraction
    forward: Callable[[Segment | Output | Tap], None]
    finished: Callable[[int], None]  # a segment's run, when this stage is done with it
    queue: deque[Segment] = field(default_factory=deque)
    busy: bool = False
    compute_s: float = 0.0
    rows: int = 0
    segments: int = 0

    def receive(self, message: Segment | Prune | Cancel) -> None:
        """A message has arrived over one of the links."""
        match message:
            case Segment():
                self.queue.append(message)
                self._start()
            case Prune():
                self.engine.prune(message)
            case Cancel():
                self.engine.cancel(message)

    def _start(self) -> None:
        if self.busy or not self.queue:
            return
        segment = self.queue.popleft()
        admitted = self.engine.admit(segment)
        if admitted is None:
            self._start()
            return
        # The tokens are computed at once, the time they take is charged: nothing that arrives
        # meanwhile could change them, for hints never change what a live row sees.
        taps, output = self.engine.compute(admitted)
        rows = len(admitted.numbers)
        seconds = self.profile.stage_seconds(rows, self.layers)
        self.busy = True
        self.compute_s += seconds
        self.rows += rows
        self.segments += rows > 0
        self.clock.at(self.clock.now + seconds, lambda: self._finish([*taps, output], segment.run))

    def _finish(self, messages: list[Segment | Output | Tap], run: int) -> None:
        self.busy = False
        for message in messages:
            self.forward(message)
        self.finished(run)
        self._start()


class VirtualRun:
    """One request in virtual time."""

    def __init__(self, coordinator: Coordinator, engines: list[StageEngine], profile: Profile,
                 clock: Clock, on_tokens: OnTokens | None) -> None:
        self._c = coordinator
        self._profile = profile
        self._clock = clock
        self._on_tokens = on_tokens
        self._busy = False
        share = profile.model.layers / len(engines)
        self._data = [Link(clock, profile) for _ in range(len(engines) + 1)]
        self._control = [Link(clock, profile) for _ in engines]
        self._back = Link(clock, profile)  # control messages from the stages to D0
        self._stages = [
            VirtualStage(clock, profile, engine, share, self._forward(i), self._finished(i))
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
        slot = self._profile.stage_seconds(self._c.request.params.segment, self._stages[0].layers)
        total = sum(link.bytes for link in (*self._data, *self._control, self._back))
        return self._c.result(slot, total, tuple(self._stage_stats(i) for i in range(len(self._stages))))

    def _stage_stats(self, index: int) -> dict[str, float]:
        stage = self._stages[index]
        return {"compute_s": stage.compute_s, "wait_s": self._clock.now - stage.compute_s,
                "rows": stage.rows, "segments": stage.segments, "bytes_out": self._data[index + 1].bytes}

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
            self._clock.at(self._clock.now + self._cost(task), lambda: self._complete(task))

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
        return p.draft.pass_ms / 1e3


class VirtualCluster:
    """A cluster in virtual time under ``profile``; implements ``runtime.request.Cluster``."""

    clock = "virtual"

    def __init__(self, model_dir: Path, stages: int, profile: Profile, dtype: str = "fp32") -> None:
        self.profile = profile
        self._device0 = DraftDevice(model_dir, dtype)
        self._engines = [
            StageEngine(load_shard(model_dir / "target", i, stages, dtype, allow_empty=True))
            for i in range(stages)
        ]
        self._session = 0

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request; raises UsageError when the request cannot fit."""
        self._session += 1
        clock = Clock()
        coordinator = self._device0.coordinator(
            request, len(self._engines), lambda: clock.now, self._session)
        return VirtualRun(coordinator, self._engines, self.profile, clock, on_tokens).run()

    def close(self) -> None:
        """Nothing is held but memory."""
