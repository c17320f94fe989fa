"""The values of config.json that decide the family and shapes, checked before a library computes with them.

A new family is a name in ``ARCHITECTURES`` once tests/stage/test_families.py compares it with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flowspec_edge.errors import UsageError

# Families whose forward pass is exactly: embeddings, layers with one full-attention mask, norm.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

_SIZES = {  # field -> the most of any model, with room
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 26,
    "draft_vocab_size": 1 << 26,
    "target_hidden_size": 1 << 20,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}
_MAY_BE_NULL = {"num_key_value_heads", "head_dim", "sliding_window", "draft_vocab_size", "target_hidden_size"}
_POSITIVE = ("rms_norm_eps", "rope_theta")


def check_config(config: Mapping[str, Any], path: Path, required: Collection[str] = ()) -> None:
    """UsageError that names the first field of ``path`` which is missing or has an impossible value."""
    for name in required:
        if name not in config:
            raise UsageError(f"{path} has no {name}")
    for name, most in _SIZES.items():
        value = config.get(name, 1)
        if value is None and name in _MAY_BE_NULL:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise UsageError(f"{path}: {name} must be a whole number from 1 to {most}, not {_shown(value)}")
    for name in _POSITIVE:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UsageError(f"{path}: {name} must be a number above 0, not {_shown(value)}")
    layers = config.get("max_window_layers", 0)
    if type(layers) is not int or layers < 0:
        raise UsageError(f"{path}: max_window_layers must be a whole number, not {_shown(layers)}")
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise UsageError(f"{path}: layer_types must be a list of names, not {_shown(kinds)}")
    check_stop_ids(config, path)


def require_family(model_type: object, path: Path | str) -> None:
    """UsageError if stages cannot run models of this type."""
    if model_type not in ARCHITECTURES:
        raise UsageError(f"{path}: stages cannot run {model_type!r} models, only {', '.join(ARCHITECTURES)}")


def check_stop_ids(config: Mapping[str, Any], path: Path) -> None:
    ids = config.get("eos_token_id")
    for one in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if type(one) is not int:
            raise UsageError(f"{path}: eos_token_id must be a whole number or a list of them, "
                             f"not {_shown(one)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
