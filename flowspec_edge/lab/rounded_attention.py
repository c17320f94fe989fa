"""Attention of transformers' models over keys and values as stages keep them in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowspec_edge.stage.layers.attention import attend
from flowspec_edge.stage.layers.kv_cache import from_int8, in_int8

_NAME = "flowspec-int8-kv"


def register_rounded() -> str:
    """Register transformers' "sdpa" over keys and values as an ``Int8KVCache`` keeps them; return its name."""
    AttentionInterface.register(_NAME, _attend_rounded)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    return _NAME


def _attend_rounded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
                    ) -> tuple[Tensor, None]:
    key, value = (from_int8(in_int8(states), states.dtype) for states in (key, value))
    if (sinks := options.get("s_aux")) is not None:
        visible = args[0]
        mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(~visible, float("-inf"))
        groups = query.shape[1] // key.shape[1]
        return attend(query, key, value, mask.repeat(1, 1, groups, 1), options["scaling"], sinks), None
    out, _ = sdpa_attention_forward(module, query, key, value, *args, **options)
    return out, None
