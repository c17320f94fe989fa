"""Attention of transformers' models as stages compute it.

Keys and values are in 8 bits, or in 16 bits in the order of each row's path, so that the reference has the last bits
of plain decoding through stages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowspec_edge.stage.layers.attention import Mask, PathMask, SharedMask, attend
from flowspec_edge.stage.layers.kv_cache import from_int8, in_int8
from flowspec_edge.stage.shard import ROW_STEP


def register(in_8_bits: bool) -> str:
    """Register transformers' "sdpa" as stages compute it, over keys and values as their caches keep them.

    Return its name.
    """
    name = "flowspec-stages-int8-kv" if in_8_bits else "flowspec-stages"
    AttentionInterface.register(name, partial(_attend, in_8_bits))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _attend(in_8_bits: bool, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
            **options: Any) -> tuple[Tensor, None]:
    if in_8_bits:
        key, value = (from_int8(in_int8(states), states.dtype) for states in (key, value))
    sinks = options.get("s_aux")
    # A window's cache does not say how long the text is, on which the order depends.
    along_paths = query.dtype != torch.float32 and getattr(module, "sliding_window", None) is None
    if sinks is None and not along_paths:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        return out, None
    n, m = query.shape[2], key.shape[2]
    visible = np.tri(n, m, m - n, dtype=bool) if mask is None else mask[0, 0].numpy(force=True)
    attention_mask: Mask = (
        PathMask(visible, 0, None, query.dtype, query.device, ROW_STEP if query.is_cuda else 1) if along_paths
        else SharedMask(visible, query.shape[1] // key.shape[1], query.dtype, query.device))
    keys_values = torch.cat((key, value)).transpose(1, 2)
    return attend(query[0].transpose(0, 1), keys_values, attention_mask, options["scaling"], sinks)[None], None
