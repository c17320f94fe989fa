"""Attention for transformers' layers that reads grouped key/value heads in place.

transformers' own "sdpa" repeats keys and values once per query head before it attends.  Here the
query heads of a group become rows of one head instead, so the cache is never copied.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "flowspec"


def register() -> None:
    """Make ``attn_implementation=NAME`` known to transformers; safe to call again."""
    AttentionInterface.register(NAME, attend)


def fold_mask(mask: Tensor, groups: int) -> Tensor:
    """[n, m] -> [1, 1, groups * n, m]: the mask for the folded rows of every key/value head."""
    return mask.repeat(groups, 1)[None, None]


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor,
           scaling: float | None = None, **_: Any) -> tuple[Tensor, None]:
    """query [1, heads, n, d], key and value [1, kv_heads, m, d], mask from :func:`fold_mask`;
    returns [1, n, heads, d]."""
    heads, n, d = query.shape[1:]
    kv_heads = key.shape[1]
    # Query head h attends to key head h // groups; it becomes row block h % groups of that head.
    folded = query.reshape(1, kv_heads, -1, d)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    out = out.view(1, kv_heads, -1, n, d).permute(0, 3, 1, 2, 4)  # [1, n, kv_heads, groups, d]
    return out.reshape(1, n, heads, d), None
