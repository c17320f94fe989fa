"""One pass of a shard's layers over the rows of a segment.

Knows tensors, the shard and its cache.  Does not know sessions, prunes or why a row is there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.messages import Int32, Segment
from flowspec_edge.stage.attention import fold_mask
from flowspec_edge.stage.cache import KVCache
from flowspec_edge.stage.shard import Shard
from flowspec_edge.tensors import to_torch


def inputs(shard: Shard, segment: Segment) -> Tensor:
    """The hidden states that enter the shard's first layer: [n, H]."""
    if shard.embed is None:
        assert segment.hidden is not None
        return to_torch(segment.hidden, shard.device)
    assert segment.tokens is not None
    ids = torch.from_numpy(segment.tokens.astype(np.int64)).to(shard.device)
    embedded: Tensor = shard.embed(ids)
    return embedded


def layers(shard: Shard, cache: KVCache, hidden: Tensor, positions: Int32, mask: NDArray[np.bool_],
           enter: Callable[[int, Tensor], bool]) -> Tensor | None:
    """Run ``hidden`` [n, H] through the shard's layers: [n, H].

    positions  [n] int32, absolute
    mask       [n, len(cache) + n] bool, True where a row sees a column
    enter      called before each layer with its index and inputs [n, H]; False gives the pass up,
               and the result is None

    Keys and values are written behind the cache's last slot; the caller appends them.
    """
    x = hidden[None]  # [1, n, H]
    ids = torch.from_numpy(positions.astype(np.int64)).to(shard.device)[None]
    # Additive and in the layers' dtype: what every SDPA kernel takes without a conversion.
    additive = torch.zeros(mask.shape, dtype=shard.dtype, device=shard.device)
    additive.masked_fill_(torch.from_numpy(~mask).to(shard.device), float("-inf"))
    folded = fold_mask(additive, shard.kv_groups)
    rotation = shard.rotary(x, position_ids=ids)
    for i, layer in enumerate(shard.modules, start=shard.layers[0]):
        if not enter(i, x[0]):
            return None
        x = layer(x, attention_mask=folded, position_ids=ids, past_key_values=cache,
                  use_cache=True, position_embeddings=rotation)
    return x[0]


def outputs(shard: Shard, hidden: Tensor) -> Tensor:
    """What leaves the shard: on the last stage after the final norm, [n, H]."""
    if shard.norm is None:
        return hidden
    normed: Tensor = shard.norm(hidden)
    return normed
