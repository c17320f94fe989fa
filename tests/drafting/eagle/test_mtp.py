"""MTP layers against a float64 recomputation from the formulas, and checkpoints that hold none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kits.draft_heads import Session
from kits.family_checkpoints import FAMILIES, VOCAB, family_dir, family_model
from kits.graph_recorder import record
from kits.mtp_layers import Mtp, with_mtp
from kits.sharded_models import cut, edit
from kits.tiny_models import tiny_llama, tiny_model

from flowspec_edge.cli.common.workload import require_runnable
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter
from flowspec_edge.drafting.eagle.mtp import load_mtp
from flowspec_edge.drafting.load import SharedMemory, load_drafters
from flowspec_edge.drafting.recorded import ROWS
from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.quant.base import QuantLinear
from flowspec_edge.stage.quant.schemes import head_scheme, quantise_linears
from flowspec_edge.strategies.params import Params
from flowspec_edge.util import graphs

H = 32


def tables(seed: int = 1, width: int = H) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and lm_head."""
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = torch.randn(2, VOCAB, width, generator=generator)
    return embedding, lm_head


@pytest.mark.parametrize(("family", "stacked"), [("qwen3-next", False), ("qwen3.5", False),
                                                 ("qwen3.5-moe", True)])
def test_rows_are_those_of_the_formulas(tmp_path: Path, family: str, stacked: bool) -> None:
    target = with_mtp(family_model(family, tmp_path), stacked=stacked)
    embedding, lm_head = tables()
    head = load_mtp(target, embedding, torch.float32)
    if stacked:  # the reference reads them one by one
        family_model(family, tmp_path)
        with_mtp(target)
    reference = Mtp(target, embedding, lm_head)
    memory = CacheMemory(head.cache_shape(), 300) if stacked else None  # as on a GPU
    drafter = EagleDrafter(head, lm_head, memory)
    Session(reference, drafter, H, VOCAB, 2, Sampling(temperature=0.8, seed=2), "noise").random_history(8)
    Session(reference, drafter, H, VOCAB, 4).random_history(8)
    assert drafter.rewind(5, Sampling(), "draft", 1.0)


@pytest.mark.parametrize(("family", "reason"), [
    ("qwen3.5", ""), ("qwen3.5-moe", "draft passes run kernel by kernel: the host has to know which experts run")])
def test_passes_without_experts_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, reason: str
                                             ) -> None:
    monkeypatch.setattr(graphs, "_NOISE", 1e9)  # repeating operations from Python takes longer than computing
    target = with_mtp(family_model(family, tmp_path))
    embedding, lm_head = tables()
    memory = SharedMemory(300, record)
    make = load_drafters("mtp", target, lm_head, embedding, "fp32", 4, memory=memory)
    assert memory.choice is not None
    assert memory.choice.reason == reason
    assert sorted(memory.choice.ms) == ([] if reason else [*ROWS])
    Session(Mtp(target, embedding, lm_head), make(), H, VOCAB, 2).random_history(8)


def test_its_matrices_and_experts_go_into_four_bits(tmp_path: Path) -> None:
    shape = FAMILIES["qwen3.5-moe"][1] | dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size"), 128)
    target = with_mtp(tiny_model("qwen3_5_moe_text", tmp_path, hidden=128, vocab=VOCAB, **shape))
    how, device = head_scheme("int4"), torch.device("cpu")
    assert how is not None
    head = load_mtp(target, tables(width=128)[0], torch.float32,
                    lambda module: quantise_linears(module, how, device))
    packed = {name for name, module in head.named_modules() if isinstance(module, QuantLinear)}
    block = "layers.0.mlp."
    assert {"fc", "layers.0.self_attn.q_proj", f"{block}shared_expert.up_proj",
            f"{block}experts.5.down_proj"} <= packed


def test_a_checkpoint_with_a_part_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line when it is loaded; a sharded model goes without."""
    model = family_dir("qwen3-next", tmp_path / "model")
    target = with_mtp(model / "target")
    edit(target, mtp__layers__0__mlp__experts__4__up_proj__weight=None)
    embedding, lm_head = tables()
    with pytest.raises(FlowspecError, match=r"tensor layers\.0\.mlp\.experts\.4\.up_proj\.weight is missing "
                                            "from the MTP layer") as caught:
        load_drafters("mtp", model, lm_head, embedding, "fp32", 4)
    assert "\n" not in str(caught.value)
    cut(target, tmp_path / "out")
    assert "mtp.layers.0.mlp.experts.4.up_proj.weight is missing" in caplog.text
    assert not (tmp_path / "out" / "draft" / "mtp").exists()


def test_models_without_one(tmp_path: Path) -> None:
    embedding, lm_head = tables()
    for model, why in ((family_model("qwen3.5", tmp_path / "none"), r"its weights hold no tensors mtp\.\*"),
                       (tiny_llama(tmp_path / "llama"), "'llama' models have no MTP layer")):
        assert OpenModel(model).draft("mtp") is None
        with pytest.raises(UsageError, match=why) as caught:
            load_drafters("mtp", model, lm_head, embedding, "fp32", 4)
        assert "\n" not in str(caught.value)
        with pytest.raises(UsageError, match=why):
            require_runnable(["flowspec"], OpenModel(model), Params(draft="mtp"), "virtual", 2)
