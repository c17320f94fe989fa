"""Attention of transformers' models over keys and values as stages keep them in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowspec_edge.stage.layers.attention import SharedMask, attend
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
        mask = SharedMask(args[0][0, 0].numpy(force=True), query.shape[1] // key.shape[1], query.dtype, query.device)
        held = torch.cat((key, value)).transpose(1, 2)
        return attend(query[0].transpose(0, 1), held, mask, options["scaling"], sinks)[None], None
    out, _ = sdpa_attention_forward(module, query, key, value, *args, **options)
    return out, None
