"""What D0 takes for its work: draft passes, lm_head, and its own bookkeeping.

Runs real requests through the coordinator that a cluster runs, in the order of a cluster's loop, with the
real draft models and a real worker that holds the whole target, and times D0's steps: all that it does
between two times that it has nothing to do.  So what it takes to send, to receive and to wake up is in
the figures.
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
from flowspec_edge.drafting.load import load_drafter
from flowspec_edge.fleet.measure_clock import typical
from flowspec_edge.fleet.measure_fit import lines
from flowspec_edge.fleet.measure_worker import Answer
from flowspec_edge.messages import Cancel, Credit, Open, Output, Prune, Segment
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.coordinator import Coordinator, Draft
from flowspec_edge.runtime.lm_head import LmHead
from flowspec_edge.runtime.request import Request
from flowspec_edge.sampling import Sampling
from flowspec_edge.stage.shard import find_embedding, load_lm_head
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.tensors import from_torch
from flowspec_edge.torchdevice import use_exact_kernels
from flowspec_edge.transport.codec import decode, encode

# Each kind of draft model does what the strategies that want it do most: passes over a tree's level,
# over one token, over what is in the pipeline.  Outputs have all their rows with chunk_pp.
STRATEGIES = {"eagle2": ("flowspec", "chunk_pp"), "lm": ("speculative",), "spd": ("spd",)}
PLAIN = "autoregressive"
_HEAD_ROWS = 16
_SAMPLING = Sampling(1.0)  # which costs more than the likeliest token, and is what chats ask for
_STAGES = 4


@dataclass
class Piece:
    """A step of D0: a draft pass over ``size`` nodes, or an output of ``size`` rows."""

    kind: Literal["draft", "verify"]
    size: int
    seconds: float
    head_s: float = 0.0  # of them for lm_head and the choice of tokens


@dataclass
class Tally:
    """What D0 did in one request after the prompt."""

    pieces: list[Piece] = field(default_factory=list)
    others_s: float = 0.0  # receiving, and waking up for nothing that calls for a piece
    heads: list[tuple[int, float]] = field(default_factory=list)  # lm_head beside them: (rows, seconds)

    @property
    def seconds(self) -> float:
        """All that D0 was awake."""
        return self.others_s + sum(piece.seconds for piece in self.pieces)


@dataclass(frozen=True)
class DraftDeviceTimes:
    """In milliseconds; ``passes`` by kind of draft model, for those that the model has."""

    passes: dict[str, float]
    node: float  # that each node adds to a pass
    lm_head: float
    row: float  # that each row adds to an output
    bookkeeping: float
    whole: bool  # whether the target was run, or its hidden states were made up


class Target(Protocol):
    """What computes segments; ``measure_worker.MeasuredWorker`` is one."""

    def send(self, message: Open | Segment | Prune | Cancel) -> None: ...

    def receive(self) -> Sequence[Answer]: ...

    def wait(self) -> None: ...


class MadeUpTarget:
    """Hidden states by chance, for a target that this device cannot hold: D0 works as it would
    below a target that seldom agrees with it."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._waiting: deque[Segment] = deque()
        self._frames: list[list[bytes]] = []

    def send(self, message: Open | Segment | Prune | Cancel) -> None:
        """Encode it, as a link does."""
        frames = encode(message)
        if isinstance(message, Open):  # the same states again
            self._random = torch.Generator().manual_seed(0)
            self._waiting.clear()
            self._frames.clear()
        elif isinstance(message, Segment):
            segment = decode([bytes(frame) for frame in frames])
            assert isinstance(segment, Segment)
            self._waiting.append(segment)

    def receive(self) -> Sequence[Answer]:
        """What the last wait has brought."""
        found = [decode(frames) for frames in self._frames]
        self._frames.clear()
        return [message for message in found if isinstance(message, Output | Credit)]

    def wait(self) -> None:
        """Make up the oldest segment's output."""
        segment = self._waiting.popleft()
        states = torch.randn(len(segment.numbers), self._width, generator=self._random).to(self._dtype)
        answers = (Credit(segment.session, segment.epoch, segment.run),
                   Output(segment.session, segment.epoch, segment.run, segment.numbers, from_torch(states)))
        self._frames += [[bytes(frame) for frame in encode(answer)] for answer in answers]


class _TimedHead(LmHead):
    """lm_head and the choice of tokens: what each row of an output costs D0's device."""

    seconds = 0.0

    def next_tokens(self, states: Tensor, positions: NDArray[np.integer], sampling: Sampling
                    ) -> NDArray[np.int32]:
        start = time.perf_counter()
        tokens = super().next_tokens(states, positions, sampling)
        self.seconds += time.perf_counter() - start
        return tokens


class MeasuredDevice0:
    """D0's models on ``device``, and requests to run on them."""

    def __init__(self, model_dir: Path, dtype: str, device: str, kinds: Sequence[str],
                 target: Target) -> None:
        use_exact_kernels()  # as runtime.device0 does
        model = ModelDir(model_dir)
        self._head = _TimedHead(load_lm_head(model.target, dtype, device))
        embedding = find_embedding(model.target, dtype, device)
        self._drafters: dict[str, Drafter] = {
            kind: load_drafter(kind, model.parts, self._head.weight, embedding, dtype, model.layers)
            for kind in kinds}
        self._target = target
        states = np.random.default_rng(0).standard_normal((_HEAD_ROWS, self._head.weight.shape[1]))
        self._states = from_torch(torch.from_numpy(states).to(self._head.weight.dtype))
        self._sessions = 0
        self.tokens: list[int] = []  # of the newest request

    def run(self, strategy: str, kind: str | None, prompt: Sequence[int], new_tokens: int) -> Tally:
        """One request; ``kind`` of draft model that the strategy drafts with, or None."""
        chosen = strategy_class(strategy)
        self._sessions += 1
        request = Request(prompt, chosen.name, new_tokens, _SAMPLING, Params())
        coordinator = Coordinator(
            request, lambda ledger: chosen(request.params, ledger, Pipeline(_STAGES)),
            self._drafters[kind] if kind else None, self._head, time.perf_counter, self._sessions)
        return self._drive(coordinator)

    def _drive(self, c: Coordinator) -> Tally:
        """To the end of the text, in the order of ``runtime.processes``."""
        target, clock, tally = self._target, time.perf_counter, Tally()
        target.send(c.open_message())
        self.tokens = []
        piece: Piece | None = None  # the newest after the prompt; what it gives rise to sending is its own
        while not c.finished:
            start = clock()
            for message in c.take_messages():
                target.send(message)
            middle = clock()
            if piece:
                piece.seconds += middle - start
            task = c.next_task()
            if task is not None:
                self._head.seconds = 0.0
                c.complete(task)
                done = clock()
                if self.tokens:
                    took = done - middle
                    piece = (Piece("draft", len(task.request.nodes), took) if isinstance(task, Draft)
                             else Piece("verify", len(task.output.numbers), took, self._head.seconds))
                    tally.pieces.append(piece)
                middle = done
                self.tokens += c.new_tokens()
            arrived = target.receive()
            for answer in arrived:
                assert not isinstance(answer, Segment)
                c.receive(answer)
            if piece:
                tally.others_s += clock() - middle
            if not arrived and task is None:
                target.wait()
        return tally

    def heads(self, times: int) -> list[tuple[int, float]]:
        """lm_head over several rows, so often: (rows, seconds)."""
        found = []
        for _ in range(times):
            self._head.seconds = 0.0
            self._head.next_tokens(self._head.states(self._states), np.arange(_HEAD_ROWS), _SAMPLING)
            found.append((_HEAD_ROWS, self._head.seconds))
        return found


def measure_device0(device0: MeasuredDevice0, kinds: Sequence[str], prompt: Sequence[int], new_tokens: int,
                    repeats: int, whole: bool, advance: Callable[[float], None]) -> DraftDeviceTimes:
    """Typical times over ``repeats`` requests of each strategy, in turn, after one that does not count."""
    wanted: list[tuple[str, str | None]] = [(name, kind) for kind in kinds for name in STRATEGIES[kind]]
    tallies: dict[str | None, list[Tally]] = {}
    for repeat in range(repeats + 1):
        for name, kind in [*wanted, (PLAIN, None)]:
            tally = device0.run(name, kind, prompt, new_tokens)
            if not kinds:  # then no output has several rows
                tally.heads += device0.heads(new_tokens)
            if repeat:
                tallies.setdefault(kind, []).append(tally)
        advance((repeat + 1) / (repeats + 1))
    return summary(tallies, whole)


def summary(tallies: dict[str | None, list[Tally]], whole: bool) -> DraftDeviceTimes:
    """The figures that, charged for every piece, come nearest to what was measured."""
    drafts = {kind: [(p.size, p.seconds) for tally in found for p in tally.pieces if p.kind == "draft"]
              for kind, found in tallies.items() if kind}
    passes, node = lines({kind: times for kind, times in drafts.items() if times})
    every = [tally for found in tallies.values() for tally in found]
    outputs = [p for tally in every for p in tally.pieces if p.kind == "verify"]
    heads, head_row = lines({"": [(p.size, p.head_s) for p in outputs if p.size]
                             + [head for tally in every for head in tally.heads]})
    books, book_row = lines({"": [(p.size, p.seconds - p.head_s) for p in outputs]})
    others = typical([tally.others_s / max(1, sum(p.kind == "verify" for p in tally.pieces))
                      for tally in every])
    return DraftDeviceTimes(
        passes={kind: 1e3 * seconds for kind, seconds in passes.items()}, node=1e3 * node,
        lm_head=1e3 * heads[""], row=1e3 * (head_row + book_row), bookkeeping=1e3 * (books[""] + others),
        whole=whole)
