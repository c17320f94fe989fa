"""AWQ and GPTQ checkpoints, dense and with experts: sharded, run, and refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.sharded_models import all_tensors, cut, edit, quantised
from kits.stages import Book, Oracle, engines, through
from kits.tiny_models import tiny_llama, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.plain import load_reference_model
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.quant.grouped import GroupedLinear
from flowspec_edge.util.tensors import to_torch

SPARSE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 64, "sliding_window": None},
}
_FIRST = {"qwen3_moe": "model.layers.1.mlp.experts.2.up_proj",
          "mixtral": "model.layers.1.block_sparse_moe.experts.2.w3"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("plain"), layers=3)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sparse")
    return {family: tiny_model(family, base / family, layers=2, **extra) for family, extra in SPARSE.items()}


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_quantised_checkpoint_keeps_its_numbers(plain: Path, tmp_path: Path, method: str) -> None:
    model = Path(shutil.copytree(plain, tmp_path / "quantised"))
    truth = AutoModelForCausalLM.from_pretrained(plain)
    for name, weight in quantised(model, method).items():
        truth.get_parameter(name).data = weight
    for module in (truth.lm_head, truth.model.embed_tokens):
        module.weight.data = module.weight.data.bfloat16().float()
    manifest = cut(model, tmp_path / "out")
    assert manifest.quantisation is not None
    assert (manifest.dtype, manifest.quantisation.group) == ("int4", 64)
    assert "quantization_config" not in json.loads((tmp_path / "out/stage-1/config.json").read_text())
    text = torch.tensor([[5, 17, 42, 3, 58, 11]])
    with torch.inference_mode():
        found: Any = load_reference_model(tmp_path / "out", "fp32")(text).logits
        torch.testing.assert_close(found, truth(text).logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(UsageError, match=r"groups of 64.*int4"):
        cut(model, tmp_path / "nf4", dtype="nf4")


def test_a_gptq_checkpoint_that_cannot_be_taken(plain: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(plain, tmp_path / "gptq"))
    quantised(model, "gptq", order=np.arange(3))
    with pytest.raises(UsageError, match=r"model\.layers\.0\..*_proj: .*act-order"):
        cut(model, tmp_path / "out")
    edit(model, model__layers__0__mlp__up_proj__bias=torch.ones(128))
    with pytest.raises(FlowspecError, match=r"no module .* for tensor model\.layers\.0\.mlp\.up_proj\.bias"):
        open_source(str(model))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", SPARSE)
def test_quantised_experts_keep_their_numbers(sparse: dict[str, Path], tmp_path: Path, family: str,
                                              method: str) -> None:
    """transformers runs the numbers that the checkpoint's integers stand for."""
    model, truth = (Path(shutil.copytree(sparse[family], tmp_path / name)) for name in ("model", "truth"))
    meant = quantised(model, method)
    kept = load_file(truth / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight", *(n for n in kept if "gate.weight" in n)):
        kept[name] = kept[name].bfloat16().float()
    save_file(kept | meant, truth / "model.safetensors", metadata={"format": "pt"})
    cut(model, tmp_path / "out", stages=2)
    packed = {name.removesuffix(".qweight") for name in all_tensors(tmp_path / "out") if "qweight" in name}
    assert packed >= {name.removesuffix(".weight") for name in meant}
    text = [5, 17, 42, 3, 58, 11]
    chain = engines(tmp_path / "out", 2, "fp32")
    _, output = through(chain, Book().text(text))
    torch.testing.assert_close(to_torch(output.hidden), Oracle(truth).forward(text), atol=1e-4, rtol=1e-4)
    for expert in chain[0].model.modules[0].experts:
        parts = dict(expert.named_children())
        assert len(parts) == 2
        assert parts["joined"].out_features == 128
        assert all(isinstance(part, GroupedLinear) for part in parts.values())


@pytest.mark.parametrize("family", SPARSE)
def test_damaged_quantised_experts_are_named(sparse: dict[str, Path], tmp_path: Path, family: str) -> None:
    name = _FIRST[family]
    router = f"{name.partition('.experts')[0]}.gate"
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({f"{name}.{part}": None for part in ("qweight", "qzeros", "scales", "g_idx")},
         f"has no tensor {name}.weight: the checkpoint is incomplete"),
        ({f"{name}.scales": None}, f"has {name}.qweight but no {name}.scales: it is incomplete"),
        ({f"{name}.qweight": torch.zeros(4, 64, dtype=torch.int32)},
         f"{name}: qweight of .* 64 x 64 has shape"),
        ({f"{router}.weight": torch.ones(7, 64)}, rf"{router}.weight has shape \[7, 64\], config.json asks"),
        ({f"{router}.weight": None, f"{router}.qweight": torch.zeros(8, 4, dtype=torch.int32)},
         f"{router} is in 4 bits: take a checkpoint that has .*routers"),
    ]
    for number, (changes, says) in enumerate(cases):
        model = Path(shutil.copytree(sparse[family], tmp_path / str(number)))
        quantised(model, "gptq")
        edit(model, **changes)
        with pytest.raises(FlowspecError, match=says) as caught:
            cut(model, tmp_path / f"out-{number}")
        assert "\n" not in str(caught.value)
