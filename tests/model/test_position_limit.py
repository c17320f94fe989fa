"""The longest text: a raw config.json and transformers' configuration give the same limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowspec_edge.model.modeldir import ModelDir, position_limit
from flowspec_edge.stage.families import load_config


@pytest.mark.parametrize(("config", "limit"), [
    # What the hub's config.json files say, shortened.
    ({"model_type": "llama", "max_position_embeddings": 4096}, 4096),  # Llama-2-7b
    ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}, 32768),  # v0.1
    ({"model_type": "qwen2", "num_hidden_layers": 28, "max_position_embeddings": 32768,
      "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 21}, 32768),
])
def test_a_window_is_no_limit(tmp_path: Path, config: dict[str, Any], limit: int) -> None:
    assert position_limit(config) == limit
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert position_limit(load_config(tmp_path).to_dict()) == limit
    assert ModelDir(tmp_path).max_positions == limit
