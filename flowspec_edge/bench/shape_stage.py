"""How long a stage of a real model's shape takes for a segment, by its rows and the cached context.

Runs a ``StageEngine`` over random layers, checks, commits and masks included, with nothing in between but
the clock.  Knows what the segment must read at least; the share of the memory's speed that this is, is how
near to its limit the stage runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flowspec_edge.bench.launches import cuda_launches, launches
from flowspec_edge.bench.shapes import SHAPES, random_stage
from flowspec_edge.bench.stopwatch import median_seconds
from flowspec_edge.messages import Open, Segment, pack_bits
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.tensors import from_torch


@dataclass(frozen=True)
class SegmentTime:
    """One segment of ``rows`` rows behind ``context`` cached ones.

    ms            of the layers that were timed, median
    whole_ms      the same, scaled to all layers of the model; not measured
    bytes         weights and cached keys and values of the timed layers, each read once
    copy_share    bytes / ms, of what a large copy on the device reads and writes a second
    launches      operations that would launch a kernel on a GPU, in the timed layers and around them
    cuda_launches as CUDA counts them; None on a CPU
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
    """A figure for each context and number of rows, as they come."""
    shard = random_stage(SHAPES[name], layers, dtype, device)
    kv_row = 2 * shard.kv_heads * shard.head_dim * shard.dtype.itemsize * layers
    for context in contexts:
        for n in rows:
            run = _segments(StageEngine(shard), n, context)
            seconds = median_seconds(run, device)
            read = shard.nbytes + context * kv_row
            yield SegmentTime(
                rows=n, context=context, ms=1e3 * seconds,
                whole_ms=1e3 * seconds / layers * SHAPES[name].num_hidden_layers, bytes=read,
                copy_share=read / seconds / copy_rate, launches=launches(run),
                cuda_launches=None if device == "cpu" else cuda_launches(run))


def _segments(engine: StageEngine, rows: int, context: int) -> Callable[[], object]:
    """What computes one more segment of a chain of ``rows`` rows; that before it is dropped."""
    shard, runs = engine.shard, 0
    engine.open(Open(session=0, epoch=0, capacity=context + rows))
    assert engine.cache is not None
    engine.cache.append(np.arange(context, dtype=np.int32))  # as if it had been computed
    for layer in engine.cache.rows():
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
        return engine.compute(admitted)

    return run
