"""Measures D0's work: draft passes, lm_head and bookkeeping.

Real requests pass through a cluster's coordinator with the real draft models and a worker that holds the
whole target.  The time that D0 is awake, sends and receives included, is charged to
D0's work items.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.fleet.profiling.fit import fit_lines, trimmed_mean
from flowspec_edge.fleet.profiling.stage import WorkerMessage
from flowspec_edge.messages import Batch, Cancel, Credit, Open, Output, Prune, Segment
from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.runtime.draft_device.coordinator import Coordinator, DraftPass
from flowspec_edge.runtime.draft_device.lm_head import LmHead
from flowspec_edge.runtime.draft_device.scheduling.scheduler import Scheduler
from flowspec_edge.runtime.request import Request
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.output_head import load_output_head
from flowspec_edge.stage.shard import find_embedding
from flowspec_edge.stage.weights.load import head_scheme_of
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.transport.codec import decode, encode
from flowspec_edge.util.tensors import from_torch
from flowspec_edge.util.torchdevice import use_exact_kernels

# For each kind of draft model the strategies that use it: passes over a tree's level, over one token, over
# what is in the pipeline.  chunk_pp adds outputs with all their rows.
STRATEGIES = {"eagle2": ("flowspec", "chunk_pp"), "lm": ("speculative",), "spd": ("spd",)}
PLAIN = "autoregressive"
_HEAD_ROWS = 16
_SAMPLING = Sampling(1.0)  # costs more than greedy, and is what chats use
_STAGES = 4


@dataclass
class WorkItem:
    """A draft pass over ``size`` nodes, or an output of ``size`` rows."""

    kind: Literal["draft", "verify"]
    size: int
    seconds: float
    head_s: float = 0.0  # of these for lm_head and sampling


@dataclass
class RequestTimes:
    """D0's work in one request after the prompt."""

    items: list[WorkItem] = field(default_factory=list)
    others_s: float = 0.0  # receiving, and waking up without a work item
    heads: list[tuple[int, float]] = field(default_factory=list)  # further runs of lm_head: (rows, seconds)

    @property
    def seconds(self) -> float:
        return self.others_s + sum(item.seconds for item in self.items)


@dataclass(frozen=True)
class DraftDeviceTimes:
    """In milliseconds; ``passes`` by kind of draft model, for those that the model has."""

    passes: dict[str, float]
    node: float  # added to a pass by each node
    lm_head: float
    row: float  # added to an output by each row
    bookkeeping: float
    real_target: bool  # the target ran; otherwise its hidden states were random


class TargetModel(Protocol):
    def send(self, message: Open | Segment | Prune | Cancel) -> None: ...

    def receive(self) -> Sequence[WorkerMessage]: ...

    def wait(self) -> None: ...


class RandomTarget:
    """Replaces a target that does not fit on this device: D0's work is as with seldom accepted drafts."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._waiting: deque[Segment] = deque()
        self._frames: list[list[bytes]] = []

    def send(self, message: Open | Segment | Prune | Cancel) -> None:
        frames = encode(message)
        if isinstance(message, Open):  # the same states in every request
            self._random = torch.Generator().manual_seed(0)
            self._waiting.clear()
            self._frames.clear()
        elif isinstance(message, Segment):
            segment = decode([bytes(frame) for frame in frames])
            assert isinstance(segment, Segment)
            self._waiting.append(segment)

    def receive(self) -> Sequence[WorkerMessage]:
        found = [decode(frames) for frames in self._frames]
        self._frames.clear()
        return [message for message in found if isinstance(message, Output | Credit)]

    def wait(self) -> None:
        segment = self._waiting.popleft()
        states = torch.randn(len(segment.numbers), self._width, generator=self._random).to(self._dtype)
        answers = (Credit(segment.session, segment.epoch, segment.run),
                   Output(segment.session, segment.epoch, segment.run, segment.numbers, from_torch(states)))
        self._frames += [[bytes(frame) for frame in encode(answer)] for answer in answers]


class _TimedHead(LmHead):
    seconds = 0.0

    def logits(self, states: Tensor) -> Tensor:
        start = time.perf_counter()
        logits = super().logits(states)
        self.seconds += time.perf_counter() - start
        return logits

    def choose(self, logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
               allowed: NDArray[np.bool_] | None = None) -> NDArray[np.int32]:
        start = time.perf_counter()
        tokens = super().choose(logits, positions, sampling, allowed)
        self.seconds += time.perf_counter() - start
        return tokens


class MeasuredDraftDevice:
    def __init__(self, model_dir: Path, dtype: str, device: str, kinds: Sequence[str],
                 target: TargetModel) -> None:
        use_exact_kernels()  # as runtime.draft_device.models does
        model = ModelDir(model_dir)
        self._head = _TimedHead(load_output_head(model.target, dtype, device, head_scheme_of(model_dir)))
        embedding = find_embedding(model.target, dtype, device)
        self._drafters: dict[str, Drafter] = {
            kind: load_drafters(kind, model.parts, self._head.head, embedding, dtype, model.layers)()
            for kind in kinds}
        self._target = target
        states = np.random.default_rng(0).standard_normal((_HEAD_ROWS, self._head.hidden_size))
        self._states = from_torch(torch.from_numpy(states).to(self._head.head.dtype))
        self._sessions = 0
        self.tokens: list[int] = []  # of the newest request

    def run(self, strategy: str, kind: str | None, prompt: Sequence[int], new_tokens: int) -> RequestTimes:
        """``kind`` of draft model; None for a strategy without one."""
        chosen = strategy_class(strategy)
        self._sessions += 1
        request = Request(prompt, chosen.name, new_tokens, _SAMPLING, Params())
        coordinator = Coordinator(
            request, lambda builder: chosen(request.params, builder, Pipeline(_STAGES)),
            self._drafters[kind] if kind else None, self._head, time.perf_counter, self._sessions)
        return self._drive(coordinator)

    def _drive(self, c: Coordinator) -> RequestTimes:
        target, clock, times = self._target, time.perf_counter, RequestTimes()
        scheduler = Scheduler()
        target.send(scheduler.add(c))
        self.tokens = []
        item: WorkItem | None = None  # the newest after the prompt; sending its messages belongs to it
        while not c.finished:
            start = clock()
            for message in scheduler.take_messages():
                assert not isinstance(message, Batch)  # there is one request
                target.send(message)
            middle = clock()
            if item:
                item.seconds += middle - start
            job = scheduler.next_job()
            if job is not None:
                [(_, task)] = job.parts
                self._head.seconds = 0.0
                c.complete(task)
                done = clock()
                if self.tokens:
                    took = done - middle
                    item = (WorkItem("draft", len(task.request.nodes), took) if isinstance(task, DraftPass)
                            else WorkItem("verify", len(task.output.numbers), took, self._head.seconds))
                    times.items.append(item)
                middle = done
                self.tokens += c.new_tokens()
            arrived = target.receive()
            for answer in arrived:
                assert not isinstance(answer, Segment)
                scheduler.receive(answer)
            if item:
                times.others_s += clock() - middle
            if not arrived and job is None:
                target.wait()
        return times

    def heads(self, times: int) -> list[tuple[int, float]]:
        """(rows, seconds) of ``times`` runs of lm_head over several rows."""
        found = []
        for _ in range(times):
            self._head.seconds = 0.0
            logits = self._head.logits(self._head.states(self._states))
            self._head.choose(logits, np.arange(_HEAD_ROWS), _SAMPLING)
            found.append((_HEAD_ROWS, self._head.seconds))
        return found


def measure_draft_device(device: MeasuredDraftDevice, kinds: Sequence[str], prompt: Sequence[int],
                         new_tokens: int, repeats: int, real_target: bool, advance: Callable[[float], None]
                         ) -> DraftDeviceTimes:
    """Mean times over ``repeats`` requests of each strategy, in turn, after a warm-up round."""
    wanted: list[tuple[str, str | None]] = [(name, kind) for kind in kinds for name in STRATEGIES[kind]]
    found: dict[str | None, list[RequestTimes]] = {}
    for repeat in range(repeats + 1):
        for name, kind in [*wanted, (PLAIN, None)]:
            times = device.run(name, kind, prompt, new_tokens)
            if not kinds:  # without drafts, no output has several rows
                times.heads += device.heads(new_tokens)
            if repeat:
                found.setdefault(kind, []).append(times)
        advance((repeat + 1) / (repeats + 1))
    return summary(found, real_target)


def summary(requests: dict[str | None, list[RequestTimes]], real_target: bool) -> DraftDeviceTimes:
    """Least squares over ``requests``, by kind of draft model."""
    drafts = {kind: [(i.size, i.seconds) for times in found for i in times.items if i.kind == "draft"]
              for kind, found in requests.items() if kind}
    passes, node = fit_lines({kind: times for kind, times in drafts.items() if times})
    every = [times for found in requests.values() for times in found]
    outputs = [i for times in every for i in times.items if i.kind == "verify"]
    heads, head_row = fit_lines({"": [(i.size, i.head_s) for i in outputs if i.size]
                                 + [head for times in every for head in times.heads]})
    books, book_row = fit_lines({"": [(i.size, i.seconds - i.head_s) for i in outputs]})
    others = trimmed_mean([times.others_s / max(1, sum(i.kind == "verify" for i in times.items))
                           for times in every])
    return DraftDeviceTimes(
        passes={kind: 1e3 * seconds for kind, seconds in passes.items()}, node=1e3 * node,
        lm_head=1e3 * heads[""], row=1e3 * (head_row + book_row), bookkeeping=1e3 * (books[""] + others),
        real_target=real_target)
