"""Attention that reads grouped key/value heads in place.

The query heads of a group become rows of one head, so that the cache is never copied.

A batch has rows of several sessions in one pass. The linear layers see all rows at once; attention runs
session by session, each over its own cache: a call over one pool of all sessions' rows would read every
cache for every row (docs/experiments/serving.md has both times).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.stage.layers.stage_cache import Part
from flowspec_edge.util.tensors import to_device


class BatchMask:
    """Additive masks of the parts' rows, in order (``attention.folded_mask``)."""

    def __init__(self, masks: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """``lengths``: rows of each part, at least one."""
        self.rows = sum(lengths)
        self._masks = masks
        self._lengths = lengths

    def attend(self, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], query: Tensor,
               keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> Tensor:
        """query [1, heads, n + padding, d] to [1, n + padding, heads, d].

        ``attend`` computes a part's rows from query, key, value and mask.  Rows of ended parts, whose key is
        None, and padding become 0.
        """
        heads, total, width = query.shape[1:]
        out = query.new_zeros(1, total, heads, width)
        start = 0
        for mask, n, key, value in zip(self._masks, self._lengths, keys, values, strict=True):
            if key is not None and value is not None:
                out[:, start : start + n] = attend(query[:, :, start : start + n], key, value, mask)
            start += n
        return out


class BatchCache:
    """The parts' caches of a kind, in a pass with a :class:`BatchMask`."""

    def __init__(self, parts: Sequence[Part], kind: int) -> None:
        """``kind``: index in ``StageCache.parts``, of keys and values."""
        self._parts = parts
        self._kind = kind

    def write(self, rows: Tensor, layer_idx: int
              ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """As ``KVCache.write``, by part; None for parts that have ended."""
        pairs = []
        for part, own in zip(self._parts, rows.split([len(part) for part in self._parts]), strict=True):
            cache: Any = part.cache.parts[self._kind]
            pairs.append((None, None) if part.ended else cache.write(own, layer_idx))
        keys, values = zip(*pairs, strict=True)
        return keys, values


_ALIGNED = 8  # elements: the mask stride that the memory-efficient kernel requires


def folded_mask(visible: NDArray[np.bool_], groups: int, dtype: torch.dtype, device: torch.device,
                rows: int = 0) -> Tensor:
    """The additive mask for ``attend``, [1, 1, groups * rows, m]: 0 where ``visible`` [n, m], -inf elsewhere.

    ``rows``: at least n, or 0 for n; the extra rows are padding and see everything.  Every SDPA kernel
    takes the layers' dtype without a conversion.  The row stride is a multiple of 8 elements, or fused CUDA
    kernels would copy the mask in every layer.
    """
    n, m = visible.shape
    rows, width = rows or n, -(-m // _ALIGNED) * _ALIGNED
    hidden = np.zeros((rows, width), dtype=bool)
    np.logical_not(visible, out=hidden[:n, :m])
    additive = torch.zeros(groups, rows, width, dtype=dtype, device=device)
    additive.masked_fill_(to_device(torch.from_numpy(hidden), device), float("-inf"))
    return additive.view(1, 1, groups * rows, width)[..., :m]


def attend(query: Tensor, key: Any, value: Any, mask: Tensor | BatchMask, scaling: float,
           sinks: Tensor | None = None) -> Tensor:
    """query [1, heads, n, d], key and value [1, kv_heads, m, d], or those of each part of a batch; returns
    [1, n, heads, d].  ``sinks`` [heads]: scores of columns whose value is 0."""
    one = partial(_attend, scaling) if sinks is None else partial(_attend_with_sinks, sinks, scaling)
    return mask.attend(one, query, key, value) if isinstance(mask, BatchMask) else one(query, key, value, mask)


def _attend(scaling: float, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    # Query head h becomes row block h % groups of key head h // groups.
    folded = query.reshape(1, key.shape[1], -1, query.shape[-1])
    return _unfolded(F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling), query)


def _attend_with_sinks(sinks: Tensor, scaling: float, query: Tensor, key: Tensor, value: Tensor,
                       mask: Tensor) -> Tensor:
    """Every head has one more column, whose score is its sink's [heads] and whose value is 0."""
    n, d = query.shape[2:]
    kv_heads = key.shape[1]
    folded = query.reshape(1, kv_heads, -1, d) * scaling
    scores = (folded @ key.mT).float() + mask
    own = sinks.float().view(kv_heads, -1).repeat_interleave(n, 1)[None, :, :, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), own)
    weights = (scores - top).exp_()
    weights /= weights.sum(-1, keepdim=True) + (own - top).exp_()
    return _unfolded(weights.to(value.dtype) @ value, query)


def _unfolded(out: Tensor, query: Tensor) -> Tensor:
    _, heads, n, d = query.shape
    out = out.view(1, out.shape[1], -1, n, d).permute(0, 3, 1, 2, 4)  # [1, n, kv_heads, groups, d]
    return out.reshape(1, n, heads, d)
