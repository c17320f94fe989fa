"""The first segments of a shard, before any that D0 waits for.

On CUDA the first ones pay for the context, for cuBLAS and for kernels that are loaded when they are first
used: seconds, in which a peer would take the stage for dead.
"""

from __future__ import annotations

import numpy as np
import torch

from flowspec_edge.messages import Open, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.memory import release
from flowspec_edge.stage.shard import Shard
from flowspec_edge.tensors import from_torch

ROWS = (1, 16, 64)  # plain decoding, a segment of a tree, a piece of a prompt


def warm_up(shard: Shard) -> None:
    """Run segments of :data:`ROWS` rows through the shard, in an engine of their own; nothing stays of them.

    FlowspecError if the memory does not suffice even for these.
    """
    engine = StageEngine(shard)
    engine.open(Open(session=0, epoch=0, capacity=sum(ROWS)))
    first = 0
    for run, rows in enumerate(ROWS):
        admitted = engine.admit(_chain(shard, run, first, rows))
        assert admitted is not None
        engine.compute(admitted)
        first += rows
    del engine
    release(shard.device)


def _chain(shard: Shard, run: int, first: int, rows: int) -> Segment:
    """Rows below one another that may all still be pruned; what they say does not matter."""
    numbers = np.arange(first, first + rows, dtype=np.int32)
    embeds = shard.embed is not None
    return Segment(
        session=0, epoch=0, run=run, first=first, stop=first + rows, numbers=numbers, positions=numbers,
        base=first, bits=np.packbits(np.tri(rows, dtype=np.uint8), axis=1, bitorder="little"),
        tokens=np.zeros(rows, dtype=np.int32) if embeds else None,
        hidden=None if embeds else from_torch(torch.zeros(rows, shard.hidden_size, dtype=shard.dtype)),
        committed=np.arange(max(0, first - (ROWS[run - 1] if run else 0)), first, dtype=np.int32))
