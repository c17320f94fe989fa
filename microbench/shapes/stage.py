"""A stage's time for a segment at a real model's shape, by rows and cached context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flowspec_edge.messages import Open, Segment, pack_bits
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.preparation import shard_of
from flowspec_edge.util.tensors import from_torch
from microbench.shapes.launches import cuda_launches, launches
from microbench.shapes.models import SHAPES, random_stage
from microbench.shapes.stopwatch import median_seconds


@dataclass(frozen=True)
class SegmentTime:
    """A segment behind ``context`` cached rows; ``ms``: median of the timed layers.

    whole_ms       ``ms`` scaled to all layers of the model
    bytes          weights and cached keys and values of the timed layers, each read once
    copy_share     bytes / ms over the rate of a large copy: how near the stage is to the memory limit
    launches       operations that would launch a kernel on a GPU
    cuda_launches  as CUDA counts them; None on a CPU
    """

    rows: int
    context: int
    ms: float
    whole_ms: float
    bytes: int
    copy_share: float
    launches: int
    cuda_launches: int | None


def segment_times(name: str, dtype: str, device: str, layers: int, rows: Sequence[int],
                  contexts: Sequence[int], copy_rate: float) -> Iterator[SegmentTime]:
    shard = random_stage(SHAPES[name], layers, dtype, device)
    kv_row = 2 * shard.config.num_key_value_heads * shard.config.head_dim * shard.dtype.itemsize * layers
    for context in contexts:
        for n in rows:
            run = _segments(StageEngine(shard), n, context)
            seconds = median_seconds(run, device)
            read_bytes = shard.nbytes + context * kv_row
            yield SegmentTime(
                rows=n, context=context, ms=1e3 * seconds,
                whole_ms=1e3 * seconds / layers * SHAPES[name].num_hidden_layers, bytes=read_bytes,
                copy_share=read_bytes / seconds / copy_rate, launches=launches(run),
                cuda_launches=None if device == "cpu" else cuda_launches(run))


def _segments(engine: StageEngine, rows: int, context: int) -> Callable[[], object]:
    """Return a function that computes another chain of ``rows`` rows; earlier segments are dropped."""
    shard, runs = shard_of(engine), 0
    engine.open(Open(session=0, epoch=0, capacity=context + rows))
    cache = engine.cache_of(0)
    assert cache is not None
    cache.fill(context)  # as after a prefill
    for layer in cache.rows():
        layer.normal_(0, 0.02)
    hidden = from_torch(torch.randn(rows, shard.hidden_size).to(shard.dtype))
    bits = pack_bits([(2 << i) - 1 for i in range(rows)], rows)

    def run() -> object:
        nonlocal runs
        first = context + runs * rows
        committed = np.arange(context if not runs else 0, dtype=np.int32)
        admitted = engine.admit(Segment(
            session=0, epoch=0, run=runs, first=first, stop=first + rows,
            numbers=np.arange(first, first + rows, dtype=np.int32),
            positions=np.arange(context, context + rows, dtype=np.int32), base=first, bits=bits,
            committed=committed, hidden=hidden))
        runs += 1
        assert admitted is not None
        return engine.compute([admitted])[0]

    return run
