"""D0's time for the parts of a turn at a real model's shape: output, draft pass, turn without products."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flowspec_edge.drafting.eagle.eagle2 import EagleHead
from flowspec_edge.model.manifest import HeadBits
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.sampling.sampler import choose, rank_children
from flowspec_edge.stage.quant.schemes import head_scheme
from flowspec_edge.util.tensors import from_torch, to_device, to_torch
from microbench.d0 import SAMPLINGS, STRATEGIES, turns
from microbench.shapes.launches import launches
from microbench.shapes.models import SHAPES, Shape, compute_dtype, random_head, random_matrix
from microbench.shapes.stopwatch import median_seconds

NODES = 10  # of a draft pass
CHILDREN = 10
ROWS = 16  # of an output
CONTEXT = 512  # rows in the head's cache
_TAU = 0.6
_TURNS = 60


@dataclass(frozen=True)
class PartTime:
    """The time of a part of a pass.

    ms        median
    launches  operations that would launch a kernel on a GPU, 0 if not counted
    """

    part: str
    ms: float
    launches: int


def part_times(name: str, dtype: str, device: str) -> Iterator[PartTime]:
    shape, computed = SHAPES[name], compute_dtype(dtype)
    at = torch.device(device)
    lm_head = random_matrix((shape.vocab_size, shape.hidden_size), computed, device)
    hidden = random_matrix((ROWS, shape.hidden_size), computed, device) * 50
    states = from_torch(hidden)
    positions = count(CONTEXT, ROWS)  # new ones in every run, so that no noise is cached

    def row_positions(rows: int) -> NDArray[np.int64]:
        return np.arange(rows) + next(positions)

    # Neighbouring logits a few units apart over the whole vocabulary, as in a trained model.
    logits = (2.5 * torch.randn(ROWS, shape.vocab_size, device=at)).to(computed)
    drafts = logits[:NODES]

    def choosing(sampling: Sampling) -> object:
        return choose(logits, row_positions(ROWS), sampling)

    def ranking(sampling: Sampling) -> object:
        rank: Rank = "draft" if sampling.greedy else "noise"
        return rank_children(drafts, row_positions(NODES), CHILDREN, sampling, rank, _TAU)

    all_bits: tuple[HeadBits, ...] = ("int8", "int4")
    packed = [bits for bits in all_bits if (scheme := head_scheme(bits))
              and scheme.fits(shape.vocab_size, shape.hidden_size)]
    head = random_head(shape, computed, device)
    head_pass = _head_pass(head, computed, device)
    with torch.inference_mode():
        yield PartTime(f"head, {NODES} nodes", 1e3 * median_seconds(head_pass, device), launches(head_pass))
    parts: dict[str, Callable[[], object]] = {
        f"lm_head, {NODES} rows": lambda: functional.linear(hidden[:NODES], lm_head),
        f"lm_head, {ROWS} rows": lambda: functional.linear(hidden, lm_head),
    }
    for bits in packed:
        parts[f"lm_head in {bits}, {ROWS} rows"] = partial(_packed_head(shape, bits, computed, at), hidden)
    for label, sampling in (("greedy", Sampling()), ("T = 1", Sampling(1.0)),
                            ("T = 1, top-p 0.9", Sampling(1.0, top_p=0.9))):
        parts[f"choose, {ROWS} rows, {label}"] = partial(choosing, sampling)
    for label, sampling in (("greedy", Sampling()), ("noise", Sampling(1.0))):
        parts[f"rank_children, {NODES} rows, {label}"] = partial(ranking, sampling)
    parts[f"{ROWS} hidden states to the device"] = lambda: to_device(to_torch(states), at)
    with torch.inference_mode():
        for part, work in parts.items():
            yield PartTime(part, 1e3 * median_seconds(work, device), launches(work))
    for strategy, (how, sampling) in product(STRATEGIES, SAMPLINGS.items()):
        costs = turns(strategy, sampling, _TURNS, shape.vocab_size, device)
        yield PartTime(f"a turn of {strategy}, {how}, without matrix products", statistics.median(costs), 0)


def _packed_head(shape: Shape, bits: HeadBits, dtype: torch.dtype, device: torch.device
                 ) -> Callable[[Tensor], Tensor]:
    """Return an output head with packed weights that nothing was quantised to: only the time counts."""
    scheme = head_scheme(bits)
    assert scheme
    head = scheme.linear(shape.vocab_size, shape.hidden_size, False, dtype, device)
    for buffer in head.buffers():
        if buffer.is_floating_point():
            buffer.fill_(0.01)
        else:
            buffer.random_(0, 127)
    return head


def _head_pass(head: EagleHead, dtype: torch.dtype, device: str) -> Callable[[], object]:
    width = head.config.hidden_size
    shape = head.cache_shape()
    cache = shape.arena(CONTEXT + NODES).take(CONTEXT + NODES)
    cache.fill(CONTEXT)
    features = random_matrix((NODES, width), dtype, device)
    tokens = torch.zeros(NODES, dtype=torch.int64, device=device)
    positions = torch.full((NODES,), CONTEXT, device=device)
    visible = np.concatenate((np.ones((NODES, CONTEXT), bool), np.eye(NODES, dtype=bool)), axis=1)
    mask = shape.mask(visible)
    return lambda: head(features, tokens, positions, mask, cache)
