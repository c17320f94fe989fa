"""Attention for transformers' layers that reads grouped key/value heads in place.

transformers' own "sdpa" repeats keys and values once per query head before it attends.  Here the
query heads of a group become rows of one head instead, so the cache is never copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface

from flowspec_edge.tensors import to_device
from flowspec_edge.torchdevice import use_exact_kernels

NAME = "flowspec"
_ALIGNED = 8  # elements: what the memory-efficient kernel demands of a mask's strides


def register() -> None:
    """Make ``attn_implementation=NAME`` known to transformers, and see to ``use_exact_kernels``; safe to call
    again."""
    AttentionInterface.register(NAME, attend)
    use_exact_kernels()


def folded_mask(visible: NDArray[np.bool_], groups: int, dtype: torch.dtype, device: torch.device,
                rows: int = 0) -> Tensor:
    """[n, m] bool, True where a row sees a column, as :func:`attend` takes it: [1, 1, groups * rows, m], 0
    where visible and -inf elsewhere.

    rows  at least n, or 0 for n; further rows are padding and see everything

    Additive and in the layers' dtype: what every SDPA kernel takes without a conversion.  Rows lie a
    multiple of 8 columns apart, or fused CUDA kernels would copy the mask in every layer.
    """
    n, m = visible.shape
    rows, width = rows or n, -(-m // _ALIGNED) * _ALIGNED
    hidden = np.zeros((rows, width), dtype=bool)
    np.logical_not(visible, out=hidden[:n, :m])
    additive = torch.zeros(groups, rows, width, dtype=dtype, device=device)
    additive.masked_fill_(to_device(torch.from_numpy(hidden), device), float("-inf"))
    return additive.view(1, 1, groups * rows, width)[..., :m]


def backend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> SDPBackend:
    """Which of its kernels scaled_dot_product_attention takes for such arguments, on their device."""
    return SDPBackend(torch._fused_sdp_choice(query, key, value, attn_mask=mask))


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor,
           scaling: float | None = None, **_: Any) -> tuple[Tensor, None]:
    """query [1, heads, n, d], key and value [1, kv_heads, m, d], mask from :func:`folded_mask`;
    returns [1, n, heads, d]."""
    heads, n, d = query.shape[1:]
    kv_heads = key.shape[1]
    # Query head h attends to key head h // groups; it becomes row block h % groups of that head.
    folded = query.reshape(1, kv_heads, -1, d)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    out = out.view(1, kv_heads, -1, n, d).permute(0, 3, 1, 2, 4)  # [1, n, kv_heads, groups, d]
    return out.reshape(1, n, heads, d), None
