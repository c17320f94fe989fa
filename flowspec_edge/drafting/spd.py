"""SPD's speculation module: the next token from whatever states the pipeline has reached.

Knows the module's arithmetic (Speculative Pipeline Decoding, sections 3.2 and 3.3 and appendix
A.3).  Does not know which states have arrived or where the rows come from: training and drafting
hand it features and say who sees whom.

Every position of the text has one *feature*.  A row that has passed l layers contributes
FC[H^0; H^(l//2); H^l] (eq. 1), a row that has passed none FC(H^0): H^0 is the embedding, H^l the
hidden state after l layers, H^L the target's post-norm final state.  Only the newest rows are
*queries*: they go through the layers.  All older rows give keys and values, at every layer from
the same feature, so that these depend on nothing but that feature and can be kept as long as it
stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

KeyValues = tuple[Tensor, Tensor]  # of one layer, keys rotated: 2 x [B, kv_heads, m, head_dim]


class _Context:
    """What transformers' attention class takes for a cache: older rows in front of its own."""

    def __init__(self, context: Sequence[KeyValues]) -> None:
        self._context = context

    def update(self, keys: Tensor, values: Tensor, layer: int) -> KeyValues:
        older_keys, older_values = self._context[layer]
        return torch.cat((older_keys, keys), dim=2), torch.cat((older_values, values), dim=2)


class SpdModule(nn.Module):
    """Feature projections, a few decoder layers of the target's shape, a norm and an own lm_head.

    ``config`` is the target's, with the module's number of layers in ``num_hidden_layers`` and the
    target's in ``target_layers``.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.target_layers = int(config.target_layers)
        config._attn_implementation = "sdpa"
        width = config.hidden_size
        self.fuse = nn.Linear(3 * width, width, bias=False)
        self.fuse_newest = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def feature(self, embedding: Tensor, middle: Tensor, deepest: Tensor) -> Tensor:
        """g (eq. 1) of rows that have passed l > 0 layers: H^0, H^(l//2) and H^l, each [..., H]."""
        out: Tensor = self.fuse(torch.cat((embedding, middle, deepest), dim=-1))
        return out

    def newest(self, embedding: Tensor) -> Tensor:
        """g^0 of rows that have passed no layer: [..., H] to [..., H]."""
        out: Tensor = self.fuse_newest(embedding)
        return out

    def keys_values(self, features: Tensor, positions: Tensor) -> list[KeyValues]:
        """What older rows offer to every layer.

        features   [B, m, H]  their features
        positions  [B, m]     int64
        returns    for each layer, keys and values [B, kv_heads, m, head_dim]
        """
        cos, sin = self.rotary_emb(features, position_ids=positions)
        shape = (*features.shape[:2], -1, self.config.head_dim)
        offered = []
        for layer in self._layers():
            inputs = layer.input_layernorm(features)
            attention: Any = layer.self_attn
            keys = attention.k_proj(inputs).view(shape).transpose(1, 2)
            values = attention.v_proj(inputs).view(shape).transpose(1, 2)
            _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
            offered.append((keys, values))
        return offered

    def forward(self, features: Tensor, positions: Tensor, context: Sequence[KeyValues], mask: Tensor
                ) -> Tensor:
        """The layers over the newest rows.

        features   [B, n, H]         g^0 of the queries
        positions  [B, n]            int64
        context    per layer, keys and values of m older rows, as :meth:`keys_values` gives them
        mask       [B, 1, n, m + n]  bool: which older rows a query sees, then which queries
                                     (appendix A: itself)
        returns    [B, n, H]         after the final norm; ``lm_head`` turns them to logits
        """
        rotary = self.rotary_emb(features, position_ids=positions)
        cache = _Context(context)
        x = features
        for layer in self._layers():
            x = layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
        out: Tensor = self.norm(x)
        return out

    def _layers(self) -> Iterator[LlamaDecoderLayer]:
        return (cast(LlamaDecoderLayer, layer) for layer in self.layers)
