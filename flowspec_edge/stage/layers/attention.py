"""Attention for transformers' layers that reads grouped key/value heads in place.

transformers' "sdpa" first repeats keys and values per query head.  Here the query heads of a group become
rows of one head, so the cache is never copied.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowspec_edge.stage.layers.batch import BatchMask
from flowspec_edge.stage.layers.kv_cache import from_int8, in_int8
from flowspec_edge.util.tensors import to_device
from flowspec_edge.util.torchdevice import use_exact_kernels

NAME = "flowspec"
_ROUNDED = "flowspec-int8-kv"
_ALIGNED = 8  # elements: the mask stride that the memory-efficient kernel requires


def register() -> None:
    """Register ``attn_implementation=NAME`` with transformers, and select exact kernels; idempotent."""
    AttentionInterface.register(NAME, attend)
    use_exact_kernels()


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


def attend(module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | BatchMask,
           scaling: float | None = None, **_: Any) -> tuple[Tensor, None]:
    """query [1, heads, n, d], key and value [1, kv_heads, m, d], or those of each part of a batch; returns
    [1, n, heads, d]."""
    if isinstance(attention_mask, BatchMask):
        return attention_mask.attend(partial(_attend, scaling), query, key, value), None
    return _attend(scaling, query, key, value, attention_mask), None


def register_rounded() -> str:
    """Register transformers' "sdpa" over keys and values as an ``Int8KVCache`` keeps them; return its
    name."""
    AttentionInterface.register(_ROUNDED, _attend_rounded)
    AttentionMaskInterface.register(_ROUNDED, sdpa_mask)
    return _ROUNDED


def _attend_rounded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
                    ) -> tuple[Tensor, None]:
    key, value = (from_int8(in_int8(states), states.dtype) for states in (key, value))
    return sdpa_attention_forward(module, query, key, value, *args, **options)


def _attend(scaling: float | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    heads, n, d = query.shape[1:]
    kv_heads = key.shape[1]
    # Query head h becomes row block h % groups of key head h // groups.
    folded = query.reshape(1, kv_heads, -1, d)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    out = out.view(1, kv_heads, -1, n, d).permute(0, 3, 1, 2, 4)  # [1, n, kv_heads, groups, d]
    return out.reshape(1, n, heads, d)
