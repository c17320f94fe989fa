"""Warm-up passes of a shard, before it accepts segments.

On CUDA the first passes pay for the context, cuBLAS and lazily loaded kernels: seconds, in which a peer would
consider the stage dead.
"""

from __future__ import annotations

import numpy as np
import torch

from flowspec_edge.messages import Open, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import Shard
from flowspec_edge.util.device_memory import release
from flowspec_edge.util.tensors import from_torch

ROWS = (1, 16, 64)  # plain decoding, a tree segment, a prompt chunk


def warm_up(shard: Shard) -> None:
    """Run segments of ``ROWS`` rows in a temporary engine; FlowspecError if the memory does not suffice."""
    engine = StageEngine(shard)
    engine.open(Open(session=0, epoch=0, capacity=sum(ROWS)))
    first = 0
    for run, rows in enumerate(ROWS):
        admitted = engine.admit(_chain(shard, run, first, rows))
        assert admitted is not None
        engine.compute([admitted])
        first += rows
    del engine
    release(shard.device)


def _chain(shard: Shard, run: int, first: int, rows: int) -> Segment:
    """A chain of uncommitted rows, with token 0 or zero hidden states."""
    numbers = np.arange(first, first + rows, dtype=np.int32)
    embeds = shard.embed is not None
    return Segment(
        session=0, epoch=0, run=run, first=first, stop=first + rows, numbers=numbers, positions=numbers,
        base=first, bits=np.packbits(np.tri(rows, dtype=np.uint8), axis=1, bitorder="little"),
        tokens=np.zeros(rows, dtype=np.int32) if embeds else None,
        hidden=None if embeds else from_torch(torch.zeros(rows, shard.hidden_size, dtype=shard.dtype)),
        committed=np.arange(max(0, first - (ROWS[run - 1] if run else 0)), first, dtype=np.int32))
