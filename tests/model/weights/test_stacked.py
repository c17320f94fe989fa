"""Stacked experts, in 16 bits and in MXFP4, against transformers' own conversion."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from kits.family_checkpoints import VOCAB, family_model
from kits.sharded_models import all_tensors, cut
from kits.stages import Book, engines, random_tokens, through
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.weights.checkpoint import Checkpoint
from flowspec_edge.model.weights.stacked import from_mxfp4
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.util.tensors import to_torch

EXPERTS = "model.layers.1.mlp.experts"
TEXT = random_tokens(30, VOCAB, seed=8)


def packed(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of [experts, rows, columns] weights about 1 / 4 wide."""
    experts, rows, columns = shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(122, 125, blocks.shape[:3], dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in MXFP4, and what transformers makes of it in 16 bits."""
    base, generator = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(1)
    plain = family_model("gpt-oss", base / "plain")
    small = family_model("gpt-oss", base / "small")
    wide = load_file(plain / "model.safetensors")
    tight = dict(wide)
    for name in [name for name in wide if re.search(r"experts\.(gate_up_proj|down_proj)$", name)]:
        blocks, scales = packed(tuple(wide[name].mT.shape), generator)
        wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        del tight[name]
        tight |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(wide, plain / "model.safetensors", metadata={"format": "pt"})
    # In two files: blocks and scales need not be together.
    names = sorted(tight)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tight[name] for name in held}, small / file)
    (small / "model.safetensors").unlink()
    (small / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {name: file for file, held in files.items() for name in held}}))
    (small / "tokenizer.json").write_text("{}")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(
        config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}))
    return small, plain


def test_every_value_of_a_block() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    scales = torch.tensor([1, 100, 118, 126, 127, 128, 130, 140, 150, 200, 250, 60, 2, 90, 129, 131],
                          dtype=torch.uint8).view(1, 8, 2)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)[0].t()
    assert torch.equal(from_mxfp4(blocks[0], scales[0]), expected)


def test_tensors_are_those_of_transformers(models: tuple[Path, Path]) -> None:
    """Whole, and any rows of them."""
    small, plain = map(Checkpoint, models)
    stacked = load_file(models[1] / "model.safetensors")
    assert set(small.names) == set(plain.names)
    for expert in range(6):
        both = stacked[f"{EXPERTS}.gate_up_proj"][expert]
        for name, matrix in (("gate_proj", both[:, ::2].t()), ("up_proj", both[:, 1::2].t()),
                             ("down_proj", stacked[f"{EXPERTS}.down_proj"][expert].t())):
            for checkpoint in (small, plain):
                file = checkpoint.file_of(f"{EXPERTS}.{expert}.{name}.weight")
                assert torch.equal(file.read(f"{EXPERTS}.{expert}.{name}.weight"), matrix)
                assert torch.equal(file.read(f"{EXPERTS}.{expert}.{name}.weight", 3, 9), matrix[3:9])
        bias = stacked[f"{EXPERTS}.gate_up_proj_bias"][expert, 1::2]
        assert torch.equal(*small.tensors([f"{EXPERTS}.{expert}.up_proj.bias"]).values(), bias)


@torch.inference_mode()
def test_stages_compute_what_transformers_does(models: tuple[Path, Path], tmp_path: Path) -> None:
    """From the checkpoint, and from shards in 16 bits."""
    whole = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32).eval()
    expected = whole.model(torch.tensor([TEXT]), use_cache=False).last_hidden_state[0]
    shards = tmp_path / "cut"
    cut(models[0], shards, 3, "fp32")
    assert "quantization_config" not in json.loads((shards / "stage-2/config.json").read_text())
    for path, stages in ((models[0], 2), (shards, 3)):
        found = to_torch(through(engines(path, stages), Book().text(TEXT))[1].hidden)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_int4_is_as_near_as_its_steps(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Sixteen even steps over the values of a group."""
    cut(models[0], tmp_path, 2, "int4")
    expert = load_shard(tmp_path, 0, 2, "fp32").modules[1].mlp.experts[2]
    exact = load_shard(models[1], 0, 2, "fp32").modules[1].mlp.experts[2]
    x = torch.eye(32)
    step = exact.gate_proj.weight.abs().max() * 2 / 15
    off = expert.gate_proj(x) - exact.gate_proj(x)
    assert off.abs().max() < step
    assert off.square().mean().sqrt() < 0.35 * step


def broken(models: tuple[Path, Path], path: Path, change: dict[str, Tensor | None]) -> Path:
    """The MXFP4 model in one file, with other tensors, or without some."""
    tensors = all_tensors(models[0])
    tensors |= {name: tensor for name, tensor in change.items() if tensor is not None}
    save_file({name: tensor for name, tensor in tensors.items() if change.get(name, tensor) is not None},
              path / "model.safetensors")
    (path / "config.json").write_text((models[0] / "config.json").read_text())
    return path


@pytest.mark.parametrize(("change", "says"), [
    ({"down_proj_scales": None}, r"has no tensor .*experts.down_proj_scales: the checkpoint is incomplete"),
    ({"down_proj_blocks": None}, r"has no tensor .*experts.down_proj_blocks: the checkpoint is incomplete"),
    ({"gate_up_proj_bias": None}, r"has no tensor .*experts.gate_up_proj_bias: the checkpoint"),
    ({"down_proj_blocks": torch.zeros(6, 32, 2, 15, dtype=torch.uint8)},
     r"model.safetensors: tensor .*down_proj_blocks is uint8 \[6, 32, 2, 15\], and must be uint8 "
     r"\[experts, rows, blocks, 16\]: copy"),
    ({"down_proj_scales": torch.zeros(6, 32, 1, dtype=torch.uint8)},
     r"down_proj_scales is uint8 \[6, 32, 1\], and must be uint8 \[6, 32, 2\], one for each block"),
    ({"down_proj_blocks": torch.zeros(5, 32, 2, 16, dtype=torch.uint8),
      "down_proj_scales": torch.zeros(5, 32, 2, dtype=torch.uint8), "down_proj_bias": torch.zeros(5, 32)},
     r"gate_up_proj has 6 experts and .*down_proj has 5 experts: the checkpoint is incomplete"),
    ({"../router.weight": torch.zeros(7, 32)}, r"mlp.router.weight has shape \[7, 32\], config.json asks for "
                                               r"\[6, 32\]"),
])
def test_damage_is_named_in_a_line(models: tuple[Path, Path], tmp_path: Path,
                                   change: dict[str, Tensor | None], says: str) -> None:
    names = {f"{EXPERTS}.{name}".replace("experts.../", ""): tensor for name, tensor in change.items()}
    with pytest.raises(FlowspecError, match=says) as caught:
        load_shard(broken(models, tmp_path, names), 0, 1, "fp32")
    assert "\n" not in str(caught.value)


def test_fewer_experts_than_the_configuration_says(models: tuple[Path, Path], tmp_path: Path) -> None:
    path = broken(models, tmp_path, {})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    with pytest.raises(FlowspecError, match=r"has no tensor model.layers.0.mlp.experts.6.*: the checkpoint"):
        load_shard(path, 0, 1, "fp32")
