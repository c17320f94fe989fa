"""Weights with NaN, infinity, or values that overflow the compute dtype are refused at load, by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from kits.tiny_models import tiny_llama
from safetensors.torch import load_file, save_file

from flowspec_edge.errors import FlowspecError
from flowspec_edge.stage.shard import load_lm_head, load_shard


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "m", layers=2, hidden=32)


def spoil(model: Path, name: str, value: float) -> None:
    file = model / "model.safetensors"
    weights = load_file(file)
    weights[name].view(-1)[-1] = value
    save_file(weights, file)


@pytest.mark.parametrize(("name", "value", "dtype", "says"), [
    ("model.norm.weight", math.nan, "fp32", "NaN for float32"),
    ("model.layers.1.mlp.down_proj.weight", -math.inf, "fp32", "infinity for float32"),
    ("model.layers.0.input_layernorm.weight", 1e6, "fp16", "too large a value for float16"),
    ("model.embed_tokens.weight", math.nan, "bf16", "NaN for bfloat16"),
])
def test_a_stage_refuses_it(model: Path, name: str, value: float, dtype: str, says: str) -> None:
    assert next(iter(load_file(model / "model.safetensors").values())).dtype == torch.float32
    spoil(model, name, value)
    with pytest.raises(FlowspecError, match=rf"tensor {name} holds {says}"):
        load_shard(model, 0, 1, dtype)


def test_d0_refuses_it(model: Path) -> None:
    spoil(model, "lm_head.weight", math.nan)
    with pytest.raises(FlowspecError, match=r"tensor lm_head\.weight holds NaN"):
        load_lm_head(model, "fp32")
