"""How long a text a model takes, from its config.json alone.

Knows the keys that transformers' configurations use, and their defaults.  Imports neither torch nor
transformers, so that a command can refuse a text before it loads anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What transformers takes where a Mistral's config.json does not say (Mistral-7B-v0.1's own value).
_MISTRAL_WINDOW = 4096


def position_limit(config: Mapping[str, Any]) -> int:
    """Tokens of prompt and answer together.

    config  a config.json's content, or ``to_dict()`` of the configuration that transformers made of it

    At most ``max_position_embeddings``, taken as it stands whatever the rope scaling, and at most the
    sliding window, if any layer has one: up to there sliding and full attention are the same, and stages
    compute full attention only.
    """
    limit = int(config["max_position_embeddings"])
    window = sliding_window(config)
    return limit if window is None else min(limit, window)


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Rows that a sliding layer sees, its own included; None where every layer sees the whole text.

    The families differ: every layer of a Mistral slides if the configuration has a window at all; a Qwen
    slides from layer ``max_window_layers`` on, or in the ``layer_types`` that say so, and only with
    ``use_sliding_window``; a Llama never does.
    """
    family = config.get("model_type")
    if family == "mistral":
        window = config.get("sliding_window", _MISTRAL_WINDOW)
    elif family in ("qwen2", "qwen3") and config.get("use_sliding_window", False):
        window = config.get("sliding_window", 4096)
        kinds = config.get("layer_types")
        if kinds is None:
            slides = config.get("max_window_layers", 28) < config["num_hidden_layers"]
        else:
            slides = "sliding_attention" in kinds
        window = window if slides else None
    else:
        window = None
    return None if window is None else int(window)
