"""One pass of a shard's layers over the rows of a segment.

Knows tensors, the shard and its cache.  Does not know sessions, prunes or why a row is there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.messages import Int32, Segment
from flowspec_edge.stage.attention import folded_mask
from flowspec_edge.stage.cache import KVCache
from flowspec_edge.stage.fused import ROW_STEP, FusedLayer, rotation
from flowspec_edge.stage.shard import Shard
from flowspec_edge.stage.staging import Pace, to_device
from flowspec_edge.tensors import to_torch


def inputs(shard: Shard, segment: Segment) -> Tensor:
    """The hidden states that enter the shard's first layer: [n, H]."""
    if shard.embed is None:
        assert segment.hidden is not None
        return to_device(to_torch(segment.hidden), shard.device)
    assert segment.tokens is not None
    ids = to_device(torch.from_numpy(segment.tokens.astype(np.int64)), shard.device)
    embedded: Tensor = shard.embed(ids)
    return embedded


def layers(shard: Shard, cache: KVCache, hidden: Tensor, positions: Int32, mask: NDArray[np.bool_],
           tap: Callable[[int, Tensor], None], go_on: Callable[[], bool], pace: Pace) -> Tensor | None:
    """Run ``hidden`` [n, H] through the shard's layers: [n, H].

    positions  [n] int32, absolute
    mask       [n, len(cache) + n] bool, True where a row sees a column
    tap        called before each layer with its index and inputs [n, H]
    go_on      asked before each layer; False gives the pass up, and the result is None
    pace       is told of each layer; the caller finishes it

    Keys and values are written behind the cache's last slot; the caller appends them.
    """
    n = len(positions)
    fused = bool(shard.modules) and isinstance(shard.modules[0], FusedLayer)
    padding = -n % ROW_STEP if fused else 0
    x = F.pad(hidden, (0, 0, 0, padding))[None] if padding else hidden[None]  # [1, n + padding, H]
    ids = to_device(torch.from_numpy(np.pad(positions.astype(np.int64), (0, padding))), shard.device)[None]
    folded = folded_mask(mask, shard.kv_groups, shard.dtype, shard.device, n + padding)
    rotated = shard.rotary(x, position_ids=ids)
    if fused:
        rotated = rotation(*rotated)
    for i, layer in enumerate(shard.modules, start=shard.layers[0]):
        tap(i, x[0, :n])
        if not go_on():
            return None
        x = layer(x, attention_mask=folded, position_ids=ids, past_key_values=cache,
                  use_cache=True, position_embeddings=rotated)
        pace.enqueued()
    return x[0, :n]


def outputs(shard: Shard, hidden: Tensor) -> Tensor:
    """What leaves the shard: on the last stage after the final norm, [n, H]."""
    if shard.norm is None:
        return hidden
    normed: Tensor = shard.norm(hidden)
    return normed
