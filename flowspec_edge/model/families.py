"""The families of models that stages can run, by ``model_type``, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families with experts, and with recurrent layers.
SPARSE = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Families that only transformers' own code computes: not fused, not split among ranks.
UNSPLIT = ("phi3", "ministral3", "gpt_oss", *RECURRENT)
MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # -> of their language model
# Families whose forward pass is exactly: embeddings, layers with attention (of all or a window) or a
# recurrence, norm.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "ministral3", "qwen3_moe", "mixtral",
                 "gpt_oss", *RECURRENT)

# What transformers takes for fields that a config.json leaves out.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"vocab_size": 32_000, "num_attention_heads": 32, "max_position_embeddings": 2_048},
    "mistral": {"vocab_size": 32_000, "num_attention_heads": 32, "num_key_value_heads": 8,
                "max_position_embeddings": 131_072},
    "qwen2": {"vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 32,
              "max_position_embeddings": 32_768},
    "qwen3": {"vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
              "max_position_embeddings": 32_768},
    "phi3": {"vocab_size": 32_064, "num_attention_heads": 32, "max_position_embeddings": 4_096},
    "ministral3": {"vocab_size": 131_072, "num_attention_heads": 32, "num_key_value_heads": 8,
                   "max_position_embeddings": 262_144},
    "qwen3_moe": {"vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 4,
                  "max_position_embeddings": 32_768},
    "mixtral": {"vocab_size": 32_000, "num_attention_heads": 32, "num_key_value_heads": 8,
                "max_position_embeddings": 131_072},
    "gpt_oss": {"vocab_size": 201_088, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                "max_position_embeddings": 131_072},
    "qwen3_next": {"vocab_size": 151_936, "num_attention_heads": 16, "num_key_value_heads": 2,
                   "head_dim": 256, "max_position_embeddings": 32_768},
    "qwen3_5_text": {"vocab_size": 248_320, "num_attention_heads": 16, "num_key_value_heads": 4,
                     "head_dim": 256, "max_position_embeddings": 32_768},
    "qwen3_5_moe_text": {"vocab_size": 248_320, "num_attention_heads": 16, "num_key_value_heads": 2,
                         "head_dim": 256, "max_position_embeddings": 32_768},
}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a language model's config.json, and transformers' defaults for those it leaves out."""
    return {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}
