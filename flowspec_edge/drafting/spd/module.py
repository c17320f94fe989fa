"""SPD's speculation module: the next token from the states that the pipeline has reached so far.

(Speculative Pipeline Decoding, sections 3.2 and 3.3 and appendix A.3.)  The *feature* of a row that has
passed l layers is FC[H^0; H^(l//2); H^l] (eq. 1), that of a row that has passed none FC(H^0): H^0 is the
embedding, H^l the hidden state after l layers, H^L the target's post-norm final state.  Only the newest rows,
the *queries*, go through the layers.  Older rows give keys and values, at every layer from the same feature,
so these are kept until the feature changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
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

from flowspec_edge.drafting import checkpoint
from flowspec_edge.errors import FlowspecError

KeyValues = tuple[Tensor, Tensor]  # of one layer, keys rotated: 2 x [B, kv_heads, m, head_dim]


class _Context:
    """A cache for transformers' attention class: older rows before its own."""

    def __init__(self, context: Sequence[KeyValues]) -> None:
        self._context = context

    def update(self, keys: Tensor, values: Tensor, layer: int) -> KeyValues:
        older_keys, older_values = self._context[layer]
        return torch.cat((older_keys, keys), dim=2), torch.cat((older_values, values), dim=2)


class SpdModule(nn.Module):
    """``config``: the target's, but ``num_hidden_layers`` is the module's, ``target_layers`` the target's."""

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
        """g (eq. 1) of rows that have passed l > 0 layers, from H^0, H^(l//2) and H^l, each [..., H]."""
        out: Tensor = self.fuse(torch.cat((embedding, middle, deepest), dim=-1))
        return out

    def newest(self, embedding: Tensor) -> Tensor:
        """g^0 of rows that have passed no layer: [..., H] to [..., H]."""
        out: Tensor = self.fuse_newest(embedding)
        return out

    def keys_values(self, features: Tensor, positions: Tensor) -> list[KeyValues]:
        """Features [B, m, H], positions [B, m] to each layer's keys and values [B, kv_heads, m, head_dim]."""
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
        """The layers over the newest rows; ``lm_head`` turns the result into logits.

        features   [B, n, H]         g^0 of the queries
        positions  [B, n]            int64
        context    of m older rows, from :meth:`keys_values`
        mask       [B, 1, n, m + n]  bool: older rows, then queries (appendix A: only itself)
        returns    [B, n, H]         after the final norm
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


_WHAT = "an SPD module"
_COUNTS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "target_layers", "vocab_size")
_STORED = (
    *_COUNTS, "attention_bias", "head_dim", "hidden_act", "intermediate_size", "max_position_embeddings",
    "mlp_bias", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
)


def load_module(directory: Path, dtype: torch.dtype) -> SpdModule:
    """UsageError for a missing file, FlowspecError that names a bad setting or tensor."""
    config = module_config(directory)
    weights = checkpoint.read_weights(directory, _WHAT)
    return checkpoint.build(SpdModule, config, weights, directory, _WHAT, dtype)


def module_config(directory: Path) -> LlamaConfig:
    """UsageError or FlowspecError if config.json is missing or unusable."""
    raw = checkpoint.read_config(directory, _WHAT)
    for key in _COUNTS:
        if not isinstance(raw.get(key), int):
            raise FlowspecError(f"{directory / 'config.json'} has no {key}: this is not an SPD module's")
    return checkpoint.llama_config({key: raw[key] for key in _STORED if key in raw}, directory)


def save_module(module: SpdModule, directory: Path, dtype: torch.dtype) -> None:
    facts = module.config.to_dict()
    config = {key: facts[key] for key in _STORED if key in facts}
    config.update(architectures=["SpdModule"], dtype=str(dtype).removeprefix("torch."))
    checkpoint.write(directory, config, module.state_dict(), dtype)
