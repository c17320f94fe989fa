"""The configuration of an EAGLE head's layer: one of Llama's, perhaps with Qwen2's biases or Qwen3's norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowspec_edge.drafting.checkpoint import layer_config
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.families import LLAMA, Family


def llama_layer(fields: Mapping[str, Any], origin: Path | str, family: Family = LLAMA) -> DecoderConfig:
    """Decide the fields of one layer with full attention; what ``fields`` leave out is as in a Llama.

    ``family``: of the layer, QWEN2 for biases of queries, keys and values alone, QWEN3 for norms of heads.
    FlowspecError for fields that do not go together.
    """
    layer_fields = {name: value for name, value in fields.items() if name not in _MODEL_FIELDS}
    return replace(layer_config(layer_fields, origin, LLAMA), model_type=family.name)


# Which layers of a model have windows is no matter of a head's.
_MODEL_FIELDS = {"layer_types", "sliding_window", "max_window_layers"}


def published(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a config.json, in the form of a Llama's."""
    rope = dict(config.ropes[""])
    return {"attention_bias": config.attention_bias, "head_dim": config.head_dim, "hidden_act": config.activation,
            "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_position_embeddings, "mlp_bias": config.mlp_bias,
            "model_type": LLAMA.name, "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers, "num_key_value_heads": config.num_key_value_heads,
            "rms_norm_eps": config.rms_norm_eps, "rope_parameters": rope, "rope_theta": rope["rope_theta"],
            "tie_word_embeddings": config.tie_word_embeddings, "vocab_size": config.vocab_size}
