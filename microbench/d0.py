"""D0's work in a turn without its matrix products: ``python -m microbench.d0 [cpu|cuda]``.

Runs requests through a scheduler over a pipeline that is always full, at the paper's tree size.  Precomputed
logits replace the products: a random text whose tokens the draft predicts as often as claimed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.d0.jobs import Job
from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.d0.slot_curve import SlotCurve
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.recorded import PassInputs, PassModel
from flowspec_edge.drafting.tree_cache import CacheShape
from flowspec_edge.drafting.tree_drafter import Rows, TreeDrafter
from flowspec_edge.messages import Batch, Credit, Output, Payload, Segment, parts_of
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.transport.codec import decode, encode
from flowspec_edge.tree.draft_api import DraftRequest
from flowspec_edge.util.tensors import to_torch

VOCABULARY = 32_000
LIMIT_MS = {"greedy": 2.0, "T 1, noise": 4.0}  # at L 80, k 10
LIMIT_TOGETHER_MS = 6.0  # of four requests
SAMPLINGS = {"greedy": Sampling(), "T 1, noise": Sampling(1.0, seed=1)}
STRATEGIES = ("flowspec", "flowspec_plus")
_PASSES = 5  # that fit into a turn of paper-7b
_STAGES = 4
_WIDTH = 4096
_SURE = 40.0  # a logit that wins whatever the noise


class _Text:
    """A fixed random text, and logits for it; the time to make them is not counted."""

    def __init__(self, vocabulary: int, device: torch.device, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.tokens: list[int] = self._rng.integers(0, vocabulary, 100_000).tolist()
        self._flat = torch.randn(64, vocabulary, device=device)  # each row's logits are copied from these
        self.seconds = 0.0

    def untimed(self, make: Callable[[], Tensor]) -> Tensor:
        start = now(self._flat.device)
        tensor = make()
        self.seconds += now(self._flat.device) - start
        return tensor

    def target_logits(self, positions: Sequence[int]) -> Tensor:
        """Return logits with which the text's next token wins at each position."""
        logits = self._flat[: len(positions)].clone()
        for row, position in zip(logits, positions, strict=True):
            row[self.tokens[position + 1]] = _SURE
        return logits

    def draft_logits(self, positions: Sequence[int], k: int = 10) -> Tensor:
        """Return logits with ``k`` likely children of each position.

        The next token is among the children as often as they claim.
        """
        logits = self._flat[: len(positions)].clone()
        for row, position in zip(logits, positions, strict=True):
            top = float(self._rng.beta(1.6, 0.6))
            p = np.sort([top, *((1 - top) * 0.5 ** np.arange(1, k))])[::-1]
            children = self._rng.integers(0, len(row), k)
            rank = int(np.searchsorted(np.cumsum(p), self._rng.random()))
            if rank < k:
                children[rank] = self.tokens[position + 1]
            row[torch.from_numpy(children).to(row.device)] = torch.from_numpy(
                np.log(p) + 20).to(row.device, row.dtype)
        return logits


class _Head(LmHead):
    def __init__(self, text: _Text, vocabulary: int, device: torch.device) -> None:
        super().__init__(torch.empty(vocabulary, 0, device=device))
        self._text = text

    @property
    def hidden_size(self) -> int:
        return _WIDTH

    def logits(self, states: Tensor) -> Tensor:
        return states  # ``choose`` has the positions, which decide

    def choose(self, logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
               allowed: NDArray[np.uint8] | None = None) -> NDArray[np.int32]:
        true = self._text.untimed(lambda: self._text.target_logits(positions.tolist()))
        return super().choose(true, positions, sampling, allowed)

    def states(self, hidden: Payload) -> Tensor:
        return to_torch(hidden).to(self.head.device, torch.float16)


_PassPositions = list[tuple[_Text, list[int]]]


class _Drafter(TreeDrafter):
    """A drafter that keeps cache, masks and outputs like an EAGLE head, without computing."""

    rows_behind = 1

    def __init__(self, text: _Text, device: torch.device, pass_positions: _PassPositions) -> None:
        """Set up the drafter of a text; ``pass_positions``: of the pass, in the texts of all drafters that share it."""
        shape = CacheShape(KeysValues(32, 1, 128), 1, torch.float16, device)
        model = PassModel(_states, lambda outputs: _draft_logits(pass_positions), _WIDTH, True, lambda position: None)
        super().__init__(shape, model)
        self._text_of = text
        self._pass_positions = pass_positions
        self._states: list[Tensor] = []

    def shares_passes_with(self, other: Drafter) -> bool:
        return True

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._text_length += len(tokens)
        if features is not None:
            self._states.append(features)
            self._queue += tokens

    def _select_outputs(self, request: DraftRequest) -> Tensor:
        self._pass_positions.append((self._text_of, [node.position for node in request.nodes]))
        return super()._select_outputs(request)

    def _inputs(self, rows: Rows) -> PassInputs:
        entering = self._states if rows.text else []
        entering += [self._outputs[node.parent][None] for node in rows.nodes]
        self._states = []
        return PassInputs([], [], entering, *rows.placed)

    def _compute(self, parts: Sequence[tuple[TreeDrafter, Rows, PassInputs]]) -> list[Tensor]:
        for drafter, rows, _ in parts:
            drafter._cache.mask(rows.placed)
            drafter._cache.for_pass(rows.placed)
        return [_states(torch.cat(inputs.states)) for *_, inputs in parts]


def _states(states: Tensor | None, *_: Any) -> Tensor:
    """Run a pass without products: its outputs are the states that it is given."""
    assert states is not None
    return states


def _draft_logits(pass_positions: _PassPositions) -> Tensor:
    """Return the logits of all rows of a pass, as one tensor."""
    parts = [partial(text.draft_logits, positions) for text, positions in pass_positions]
    logits = pass_positions[0][0].untimed(lambda: torch.cat([part() for part in parts]))
    pass_positions.clear()
    return logits


def turns(name: str, sampling: Sampling, count: int = 300, vocabulary: int = VOCABULARY,
          device: str = "cpu", seed: int = 0, requests: int = 1) -> list[float]:
    """Measure the milliseconds of D0's work in each of ``count`` turns without matrix products.

    ``requests`` share its segments.
    """
    on = torch.device(device)
    texts = [_Text(vocabulary, on, seed + i) for i in range(requests)]
    scheduler, pass_positions = Scheduler(), _PassPositions()
    for i, text in enumerate(texts):
        scheduler.add(_draft_session(name, sampling, text, vocabulary, on, i + 1, pass_positions))
    pipeline: deque[Segment | Batch] = deque()
    costs: list[float] = []
    while len(costs) < count + 2 * _STAGES:
        reading = not all(c.tokens for c in scheduler)
        full = len(pipeline) == _STAGES or (pipeline and reading)  # prompts come back alone
        arriving = [frames(part) for part in parts_of(pipeline.popleft())] if full else []  # type: ignore[arg-type]
        spent, start = sum(text.seconds for text in texts), now(on)
        for message in arriving:
            scheduler.receive(decode(message))  # type: ignore[arg-type]
        while (job := scheduler.next_job()) is not None and not job.is_draft:
            _complete(job)
        for out in scheduler.take_messages():
            encode(out)
            if isinstance(out, Segment | Batch):
                pipeline.append(out)
                first = out.parts[0] if isinstance(out, Batch) else out
                scheduler.receive(Credit(first.session, first.epoch, first.run))
        for _ in range(_PASSES):
            if job is None:
                break
            _complete(job)
            job = scheduler.next_job()
        if not reading:
            costs.append((now(on) - start - sum(text.seconds for text in texts) + spent) * 1e3)
    return costs[2 * _STAGES:]


def _complete(job: Job) -> None:
    for _, error in job.complete():
        raise error


def _draft_session(name: str, sampling: Sampling, text: _Text, vocabulary: int, device: torch.device,
                   session: int, pass_positions: _PassPositions) -> DraftSession:
    request = Request(text.tokens[:8], name, 90_000, sampling, Params())
    pipeline = Pipeline(_STAGES, slot_seconds=SlotCurve().seconds)
    return DraftSession(request, lambda builder: strategy_class(name)(request.params, builder, pipeline),
                        _Drafter(text, device, pass_positions), _Head(text, vocabulary, device), time.perf_counter,
                        session)


def now(device: torch.device) -> float:
    """Return the time in seconds, when a GPU has finished its work."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def frames(segment: Segment) -> list[bytes]:
    hidden = Payload("float16", np.zeros((len(segment.numbers), _WIDTH), np.float16))
    return [bytes(frame) for frame in
            encode(Output(segment.session, segment.epoch, segment.run, segment.numbers, hidden))]


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_num_threads(1)
    for requests, name, (label, sampling) in product((1, 4), STRATEGIES, SAMPLINGS.items()):
        costs = turns(name, sampling, device=device, requests=requests)
        p90 = statistics.quantiles(costs, n=10)[-1]
        limit_ms = LIMIT_MS[label] if requests == 1 else LIMIT_TOGETHER_MS
        print(f"D0 on {device}, V {VOCABULARY:,}, per turn, {requests} x {name}, {label}: median "
              f"{statistics.median(costs):.2f} ms, p90 {p90:.2f} ms (wanted: median at most {limit_ms:g} ms)")


if __name__ == "__main__":
    main()
