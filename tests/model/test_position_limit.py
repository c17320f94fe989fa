"""The longest text: a raw config.json and transformers' configuration give the same limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowspec_edge.model.modeldir import ModelDir, position_limit, sliding_window
from flowspec_edge.stage.families import load_config

_QWEN = {"model_type": "qwen2", "num_hidden_layers": 28, "max_position_embeddings": 32768}


@pytest.mark.parametrize(("config", "window", "limit"), [
    # What the hub's config.json files say, shortened.
    ({"model_type": "llama", "max_position_embeddings": 4096}, None, 4096),  # Llama-2-7b
    ({"model_type": "llama", "max_position_embeddings": 8192, "sliding_window": 16}, None, 8192),
    ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}, 4096, 4096),  # v0.1
    ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": None}, None, 32768),
    ({"model_type": "mistral", "max_position_embeddings": 32768}, 4096, 4096),
    ({"model_type": "mistral", "max_position_embeddings": 1024}, 4096, 1024),
    (_QWEN | {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}, None, 32768),
    (_QWEN | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 21}, 512, 512),
    (_QWEN | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 28}, None, 32768),
    (_QWEN | {"use_sliding_window": True, "sliding_window": None}, None, 32768),
    (_QWEN | {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["full_attention"] * 28},
     None, 32768),
    (_QWEN | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 512,
              "layer_types": ["full_attention", "sliding_attention"] * 14}, 512, 512),
])
def test_a_window_is_a_limit(tmp_path: Path, config: dict[str, Any], window: int | None, limit: int) -> None:
    assert sliding_window(config) == window
    assert position_limit(config) == limit
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert position_limit(load_config(tmp_path).to_dict()) == limit
    assert ModelDir(tmp_path).max_positions == limit
