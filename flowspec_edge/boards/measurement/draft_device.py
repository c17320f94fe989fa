"""Measures D0's work: draft passes, lm_head and bookkeeping.

Real requests pass through a cluster's scheduler, with its draft models, and a worker that holds the whole
target, or its first layer if that is too large: drafts are then seldom accepted.  The time that
D0 is awake, sends and receives included, is charged to D0's work items.

A ``ProcessCluster`` would not do: it cannot run a part of the target, and its observers see the jobs, but not
the time between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.boards.measurement.fit import fit_lines, trimmed_mean
from flowspec_edge.boards.measurement.stage import MeasuredWorker
from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.d0.session import DraftPass, DraftSession
from flowspec_edge.messages import Batch
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, stored_kinds
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.util.tensors import from_torch

PLAIN = "autoregressive"
_HEAD_ROWS = 16
_SAMPLING = Sampling(1.0)  # costs more than greedy, and is what chats use
_STAGES = 4
_CONTEXT, _DRAFT_ROWS = 4096, 1024  # of a served model's caches


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
    """Times in milliseconds; ``passes`` by kind of draft model, for those that the model has."""

    passes: dict[str, float]
    node: float  # added to a pass by each node
    lm_head: float
    row: float  # added to an output by each row
    bookkeeping: float
    real_target: bool  # all of its layers ran
    graphs: bool = False  # the passes of every kind were CUDA graphs


def measured_kinds() -> list[DraftKind]:
    """List the kinds of draft models whose passes are measured by the strategies that they name.

    Those differ in what a pass expands: a tree's level, one token, what is in the pipeline.  chunk_pp adds outputs
    with all their rows.
    """
    return [kind for kind in stored_kinds() if kind.measured_by]


class _TimedHead(LmHead):
    seconds = 0.0

    def logits(self, states: Tensor) -> Tensor:
        start = time.perf_counter()
        logits = super().logits(states)
        self.seconds += time.perf_counter() - start
        return logits

    def choose(self, logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
               allowed: NDArray[np.uint8] | None = None) -> NDArray[np.int32]:
        start = time.perf_counter()
        tokens = super().choose(logits, positions, sampling, allowed)
        self.seconds += time.perf_counter() - start
        return tokens


class MeasuredDraftDevice:
    def __init__(self, model_dir: Path, dtype: str, device: str, target: MeasuredWorker) -> None:
        model = OpenModel(model_dir)
        rows = min(model.max_positions, _CONTEXT) + _DRAFT_ROWS
        self._models = DraftModels(model, dtype, device, cache_rows=rows)
        self._target = target
        self._sessions = 0
        self.tokens: list[int] = []  # of the newest request

    @property
    def runs_graphs(self) -> bool:
        """Whether passes of the draft models that have been used run as CUDA graphs."""
        return bool(self._models.graph_sizes) and all(self._models.graph_sizes.values())

    def run(self, strategy: str, prompt: Sequence[int], new_tokens: int) -> RequestTimes:
        self._sessions += 1
        draft_session = self._models.draft_session(
            Request(prompt, strategy, new_tokens, _SAMPLING), _STAGES, time.perf_counter, self._sessions,
            lambda kind: 1.0)
        assert isinstance(draft_session.head, LmHead)
        self._head = draft_session.head = _TimedHead(draft_session.head.head)
        return self._drive(draft_session)

    def _drive(self, c: DraftSession) -> RequestTimes:
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
                end = clock()
                if self.tokens:
                    duration = end - middle
                    item = (WorkItem("draft", len(task.request.nodes), duration) if isinstance(task, DraftPass)
                            else WorkItem("verify", len(task.output.numbers), duration, self._head.seconds))
                    times.items.append(item)
                middle = end
                self.tokens += c.new_tokens()
            arrived = target.receive()
            for answer in arrived:
                scheduler.receive(answer)
            if item:
                times.others_s += clock() - middle
            if not arrived and job is None:
                target.wait()
        return times

    def heads(self, times: int) -> list[tuple[int, float]]:
        """Run lm_head over several rows, ``times`` times, after a first request; return (rows, seconds) of each run."""
        runs, head = [], self._head
        states = np.random.default_rng(0).standard_normal((_HEAD_ROWS, head.hidden_size))
        payload = from_torch(torch.from_numpy(states).to(head.head.dtype))
        for _ in range(times):
            head.seconds = 0.0
            logits = head.logits(head.states(payload))
            head.choose(logits, np.arange(_HEAD_ROWS), _SAMPLING)
            runs.append((_HEAD_ROWS, head.seconds))
        return runs


def measure_draft_device(device: MeasuredDraftDevice, kinds: Sequence[str], prompt: Sequence[int],
                         new_tokens: int, repeats: int, real_target: bool, advance: Callable[[float], None]
                         ) -> DraftDeviceTimes:
    """Measure mean times over ``repeats`` requests of each strategy, in turn, after a warm-up round."""
    strategies: list[tuple[str, str | None]] = [
        (name, kind) for kind in kinds for name in DRAFT_KINDS[kind].measured_by]
    times_by_kind: dict[str | None, list[RequestTimes]] = {}
    for repeat in range(repeats + 1):
        for name, kind in [*strategies, (PLAIN, None)]:
            times = device.run(name, prompt, new_tokens)
            if not kinds:  # without drafts, no output has several rows
                times.heads += device.heads(new_tokens)
            if repeat:
                times_by_kind.setdefault(kind, []).append(times)
        advance((repeat + 1) / (repeats + 1))
    return replace(summary(times_by_kind, real_target), graphs=device.runs_graphs)


def summary(requests: dict[str | None, list[RequestTimes]], real_target: bool) -> DraftDeviceTimes:
    """Fit the times by least squares over ``requests``, by kind of draft model."""
    drafts = {kind: [(i.size, i.seconds) for times in kind_requests for i in times.items if i.kind == "draft"]
              for kind, kind_requests in requests.items() if kind}
    passes, node = fit_lines({kind: times for kind, times in drafts.items() if times})
    every = [times for kind_requests in requests.values() for times in kind_requests]
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
