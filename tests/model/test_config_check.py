"""Impossible values of config.json are blamed on their field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import check_config, resolve_model

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
         "max_position_embeddings")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-5, 0, 10**12, "7", None, 7.0, True, [7], float("nan")])
def test_a_size_is_a_whole_number_in_its_range(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"config\.json: {name} must be a whole number from 1 to"):
        check_config({"model_type": "llama", name: value}, tmp_path / "config.json")


@pytest.mark.parametrize(("name", "value"), [
    ("rms_norm_eps", 0), ("rms_norm_eps", "1e-6"), ("rope_theta", float("inf")), ("max_window_layers", -1),
    ("layer_types", "full_attention"), ("layer_types", [1]), ("eos_token_id", "</s>"),
    ("eos_token_id", [1, {}]),
    ("head_dim", 0), ("num_key_value_heads", -1), ("sliding_window", 0.5),
])
def test_other_fields(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"c: {name} must be"):
        check_config({name: value}, Path("c"))


def test_values_that_models_have() -> None:
    check_config({"sliding_window": None, "head_dim": None, "num_key_value_heads": None, "eos_token_id": None,
                  "rope_theta": 1_000_000, "max_position_embeddings": 131072, "vocab_size": 256_000,
                  "layer_types": ["full_attention"], "max_window_layers": 0}, Path("c"))


def test_a_model_with_such_a_field_is_refused(tmp_path: Path) -> None:
    demo = resolve_model("demo").target
    for file in demo.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(
        {**json.loads((demo / "config.json").read_text()), "hidden_size": -5}))
    with pytest.raises(UsageError, match=r"hidden_size must be a whole number from 1 to 1048576, not -5"):
        resolve_model(tmp_path)
