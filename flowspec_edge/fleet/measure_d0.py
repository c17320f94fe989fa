"""What D0 takes for its work: draft passes, lm_head, and its own bookkeeping.

Runs real requests through the coordinator that a cluster runs, with the real draft models and a stage
engine that holds the whole target, in this process, and times D0's steps.  What a driver adds to them
beside the codec is ``measure_driver``'s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.load import load_drafter
from flowspec_edge.fleet.measure_clock import typical, typical_sum
from flowspec_edge.messages import Credit, Open, Output, Payload, Segment
from flowspec_edge.runtime.coordinator import Coordinator, Draft
from flowspec_edge.runtime.request import Request
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_embedding, load_lm_head, load_shard
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.tensors import from_torch, to_torch
from flowspec_edge.transport.codec import decode, encode

# Each kind of draft model does what the strategies that want it do most: passes over a tree's level,
# over one token, over what is in the pipeline.
STRATEGY = {"eagle2": "flowspec", "lm": "speculative", "spd": "spd"}
_PLAIN = "autoregressive"  # for a model without draft models
_HEAD_ROWS = 16
_STAGES = 4

Clock = Callable[[], float]
T = TypeVar("T")


@dataclass
class Tally:
    """Seconds that D0 spent in one request after the prompt, by what it did."""

    draft: list[float] = field(default_factory=list)  # each pass
    head: list[float] = field(default_factory=list)  # lm_head over 16 rows, once an output
    own_head: list[float] = field(default_factory=list)  # lm_head over the output's own rows
    books: list[float] = field(default_factory=list)  # all else, by output


@dataclass(frozen=True)
class DraftDeviceTimes:
    """In milliseconds; ``passes`` by kind of draft model, for those that the model has."""

    passes: dict[str, float]
    lm_head: float
    bookkeeping: float
    whole: bool  # whether the target was run, or its hidden states were made up


class Target(Protocol):
    """What computes segments."""

    def open(self, message: Open) -> None: ...

    def output(self, segment: Segment) -> Output: ...


class WholeTarget:
    """All layers in this process."""

    def __init__(self, target: Path, dtype: str, device: str) -> None:
        self._engine = StageEngine(load_shard(target, 0, 1, dtype, device))

    def open(self, message: Open) -> None:
        """A new session."""
        self._engine.open(message)

    def output(self, segment: Segment) -> Output:
        """What the last stage would send."""
        admitted = self._engine.admit(segment)
        assert admitted is not None, "a segment of the open session is never stale"
        result = self._engine.compute(admitted)[1]
        assert isinstance(result, Output)
        return result


class MadeUpTarget:
    """Hidden states by chance, for a target that this device cannot hold: D0 works as it would
    below a target that seldom agrees with it."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype

    def open(self, message: Open) -> None:
        """A new session: the same states again."""
        self._random = torch.Generator().manual_seed(0)

    def output(self, segment: Segment) -> Output:
        """States of the right shape."""
        states = torch.randn(len(segment.numbers), self._width, generator=self._random).to(self._dtype)
        return Output(segment.session, segment.epoch, segment.run, segment.numbers, from_torch(states))


class MeasuredDevice0:
    """D0's models on ``device``, and requests to run on them."""

    def __init__(self, model_dir: Path, dtype: str, device: str, kinds: Sequence[str],
                 target: Target) -> None:
        self._lm_head = load_lm_head(model_dir / "target", dtype, device)
        embedding = load_embedding(model_dir / "target", dtype, device)
        self._drafters: dict[str, Drafter] = {
            kind: load_drafter(kind, model_dir, self._lm_head, embedding, dtype) for kind in kinds}
        self._target = target
        states = np.random.default_rng(0).standard_normal((_HEAD_ROWS, self._lm_head.shape[1]))
        self._states = from_torch(torch.from_numpy(states).to(self._lm_head.dtype))
        self._sessions = 0
        self.tokens: list[int] = []  # of the newest request
        self._head_s = 0.0

    def run(self, kind: str | None, prompt: Sequence[int], new_tokens: int,
            clock: Clock = time.perf_counter) -> Tally:
        """One request with the strategy that measures this kind of draft model, none of them for None.

        ``clock`` tells seconds: those of the wall, or those that the processor worked.
        """
        self._clock = clock
        chosen = strategy_class(STRATEGY[kind] if kind else _PLAIN)
        self._sessions += 1
        request = Request(prompt, chosen.name, new_tokens, params=Params())
        coordinator = Coordinator(
            request, lambda ledger: chosen(request.params, ledger, Pipeline(_STAGES)),
            self._drafters[kind] if kind else None, self._head, time.perf_counter, self._sessions)
        return self._drive(coordinator)

    def _drive(self, c: Coordinator) -> Tally:
        """To the end of the text: D0 drafts whatever it may before the oldest segment comes back."""
        tally, waiting = Tally(), deque[Segment]()
        self._target.open(c.open_message())
        self.tokens = []
        books, decoding = 0.0, False
        while not c.finished:
            took, (frames, task) = self._timed(
                lambda: ([encode(message) for message in c.take_messages()], c.next_task()))
            books += took
            messages = (decode([bytes(frame) for frame in message]) for message in frames)
            waiting += (message for message in messages if isinstance(message, Segment))
            if task is None:
                segment = waiting.popleft()
                sent = [bytes(frame) for frame in encode(self._target.output(segment))]
                took, output = self._timed(partial(decode, sent))
                assert isinstance(output, Output)
                c.receive(output)
                c.receive(Credit(segment.session, segment.epoch, segment.run))
                books += took
                continue
            self._head_s = 0.0
            took, _ = self._timed(partial(c.complete, task))
            if isinstance(task, Draft):
                tally.draft.append(took)
                continue
            if decoding:
                tally.books.append(books + took - self._head_s)
                tally.own_head.append(self._head_s)
                tally.head.append(self._timed(lambda: self._head(self._states))[0])
            new = c.new_tokens()
            self.tokens += new
            books, decoding = 0.0, decoding or bool(new)
        return tally

    def _head(self, hidden: Payload) -> NDArray[np.float32]:
        """As ``runtime.device0`` has it."""
        start = self._clock()
        with torch.inference_mode():
            rows = to_torch(hidden).to(self._lm_head)
            logits: NDArray[np.float32] = (rows @ self._lm_head.mT).float().cpu().numpy()
        self._head_s += self._clock() - start
        return logits

    def _timed(self, work: Callable[[], T]) -> tuple[float, T]:
        start = self._clock()
        result = work()
        return self._clock() - start, result


def measure_device0(device0: MeasuredDevice0, kinds: Sequence[str], prompt: Sequence[int], new_tokens: int,
                    repeats: int, whole: bool, advance: Callable[[float], None]) -> DraftDeviceTimes:
    """Typical times over ``repeats`` requests of each kind, in turn, after one that does not count."""
    wanted: Sequence[str | None] = kinds or [None]
    tallies: dict[str | None, list[Tally]] = {kind: [] for kind in wanted}
    for repeat in range(repeats + 1):
        for kind, found in tallies.items():
            tally = device0.run(kind, prompt, new_tokens)
            if repeat:
                found.append(tally)
        advance((repeat + 1) / (repeats + 1))
    # The same request makes the same steps every time: each has a typical time of its own.
    first = next(iter(tallies.values()))
    books = [tally.books for tally in first]
    return DraftDeviceTimes(
        passes={kind: 1e3 * _mean([tally.draft for tally in found])
                for kind, found in tallies.items() if kind},
        lm_head=1e3 * typical([t for found in tallies.values() for tally in found for t in tally.head]),
        bookkeeping=1e3 * _mean(books), whole=whole)


def _mean(runs: Sequence[Sequence[float]]) -> float:
    """Of a step; should rounding on a GPU have changed a text, of the steps that all runs have."""
    steps = min(map(len, runs))
    return typical_sum([run[:steps] for run in runs]) / steps if steps else 0.0
