"""What a draft pass asks of a GPU: kernels, copies of its cache, waits; counted on the strict device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from strictdevice import Log, counting
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, EagleHead, eagle_config
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Head
from flowspec_edge.drafting.eagle.head_config import llama_layer
from flowspec_edge.drafting.eagle.mtp import MtpHead
from flowspec_edge.drafting.lm import load_lm
from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.lab.spd.drafter import SpdDrafter
from flowspec_edge.lab.spd.module import SpdModule
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.model.decoder_config import decoder_config
from flowspec_edge.model.output_head import as_output_head
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.sampling.sampler import choose, rank_children
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

pytestmark = pytest.mark.strict

H, V, TEXT, NODES = 128, 8192, 300, 10


def config(**changed: object) -> LlamaConfig:
    return LlamaConfig(**{"vocab_size": V, "hidden_size": H, "intermediate_size": 256, "num_hidden_layers": 1,
                          "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "bias": True,
                          **changed})


@pytest.fixture(params=[False, True], ids=["torch 2.8", "torch 2.9"])
def rms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether RMS norms are one kernel."""
    fused: bool = request.param
    monkeypatch.setattr("flowspec_edge.util.kernels.fuses_rms_norm", lambda device: fused)
    return fused


def a_pass(drafters: Sequence[TreeDrafter], rms: bool) -> Log:
    """Of NODES children of the root, for each drafter, that of a text which has been read before."""
    taking_part = []
    for drafter in drafters:
        drafter.commit([1], None)
        features = torch.randn(TEXT, H, dtype=torch.float16).to("cuda")
        for layer in drafter.taps:
            states = Payload("float16", np.zeros((TEXT, H), np.float16))
            drafter.tap(Tap(0, 0, 0, layer, np.arange(TEXT, dtype=np.int32), states))
        drafter.commit([1] * TEXT, features, range(TEXT))
        got = drafter.expand(DraftRequest(0, (DraftNode(0, -1, 1, TEXT),), NODES))
        nodes = tuple(DraftNode(1 + i, 0, token, TEXT + 1) for i, token in enumerate(got.tokens[0].tolist()))
        taking_part.append((drafter, DraftRequest(0, nodes, NODES)))
    with counting(fused_rms=rms) as log:
        if len(taking_part) == 1:
            found = [taking_part[0][0].expand(taking_part[0][1])]
        else:
            found = TreeDrafter.expand_together(taking_part)
    assert all(np.isfinite(output.scores).all() for output in found)
    # Of the children come down their tokens and scores, and no logits.
    assert [event.nbytes for event in log.of("download, waits")] == [len(drafters) * NODES * NODES * 8]
    return log


def copies_no_cache(log: Log, cache_bytes: int) -> bool:
    return all(event.nbytes < cache_bytes for event in log.of("launch")
               if event.place.startswith("drafting/") and event.name.startswith(("copy_", "cat", "clone")))


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("sessions", [1, 3])
def test_a_heads_pass(kv_heads: int, sessions: int, rms: bool) -> None:
    """Greedy, over one memory if there are several.  Grouped heads' queries, outputs and sums are put in order, their
    cache is not copied."""
    torch.manual_seed(0)
    head = EagleHead(eagle_config(config(num_key_value_heads=kv_heads).to_dict(), "a head")).half().to("cuda")
    lm_head = torch.randn(V, H, dtype=torch.float16).to("cuda")
    memory = CacheMemory(head.cache_shape(), 1280) if sessions > 1 else None
    log = a_pass([EagleDrafter(head, lm_head, memory) for _ in range(sessions)], rms)
    assert log.launches.total() <= 33 - rms + 3 * (kv_heads < 8) + 3 * (sessions > 1), log.launches
    assert len(log.waits) == 1
    assert copies_no_cache(log, TEXT * kv_heads * 64 * 2)


def test_a_pass_of_an_eagle_3_head(rms: bool) -> None:
    torch.manual_seed(0)
    layer = vars(llama_layer(config(num_key_value_heads=2).to_dict(), "a head"))
    head = Eagle3Head(Eagle3Config(**layer, target_hidden_size=H, draft_vocab_size=V)).half().to("cuda")
    log = a_pass([Eagle3Drafter(head, [2, 4, 6])], rms)
    assert log.launches.total() <= 41 - 4 * rms, log.launches
    assert copies_no_cache(log, TEXT * 2 * 64 * 2)


@pytest.mark.parametrize(("family", "most"), [("qwen3_5_text", 71), ("qwen3_5_moe_text", 132)])
def test_a_pass_of_an_mtp_layer(family: str, most: int) -> None:
    """Without the products of the experts that rows have chosen."""
    torch.manual_seed(0)
    settings = decoder_config({
        "model_type": family, "vocab_size": V, "hidden_size": H, "intermediate_size": 256, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "layer_types": ["full_attention"],
    }, "a test")
    head = checkpoint.on_meta(MtpHead, settings).to_empty(device="cpu")
    for weight in head.parameters():
        weight.data = torch.randn(weight.shape, dtype=weight.dtype) * H**-0.5
    head.to("cuda")
    lm_head = torch.randn(V, H).to("cuda")
    log = a_pass([EagleDrafter(head, lm_head)], False)
    experts = getattr(head.layers[0].mlp, "experts", None)
    chosen = 0 if experts is None else len(experts.expert_ids.unique())
    assert log.launches.total() - 3 * chosen <= most, log.launches


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_pass_of_a_small_model(sessions: int, rms: bool, tmp_path: Path) -> None:
    """Of TinyLlama's layers, narrow; for several requests over one memory, as on a GPU."""
    torch.manual_seed(0)
    LlamaForCausalLM(config(num_hidden_layers=22, num_key_value_heads=2)).save_pretrained(tmp_path)
    first = load_lm(tmp_path, tmp_path, V, torch.float16, torch.device("cuda"))
    memory = CacheMemory(first.shape, 1280) if sessions > 1 else None
    log = a_pass([first.clone_session(memory) for _ in range(sessions)], rms)
    assert log.launches.total() <= 414 - 45 * rms + 3 * (sessions > 1), log.launches
    assert copies_no_cache(log, TEXT * 2 * 64 * 2)


def test_spds_mask_is_made_once() -> None:
    settings = config(num_hidden_layers=4, num_key_value_heads=2, target_layers=8)
    settings.target_layers = 8
    module = SpdModule(settings).half().to("cuda")
    drafter = SpdDrafter(module, torch.randn(V, H, dtype=torch.float16).to("cuda"))
    drafter.commit([1], None)
    drafter.commit([1] * 4, torch.randn(4, H, dtype=torch.float16).to("cuda"), range(4))
    with counting() as log:
        drafter.expand(DraftRequest(0, (DraftNode(0, -1, 1, 4),), 3))
    assert log.launches["masked_fill_"] == 1
    assert [event.nbytes for event in log.of("download, waits")] == [3 * 8]
    assert not {name for name in log.launches if "pad" in name or "where" in name}


RANKS: list[tuple[Sampling, Rank]] = [
    (Sampling(), "draft"), (Sampling(1.0), "noise"), (Sampling(0.7, 20, 0.9), "noise"),
    (Sampling(1.0, top_p=0.9), "noise")]


def test_what_requests_ask_of_d0_has_run_before() -> None:
    """Kernels are loaded on first use."""
    head = LmHead(torch.randn(V, H, dtype=torch.float16).to("cuda"))
    with counting() as warm:
        head.warm_up()
    bits, states = np.full((5, V // 8), 0xFF, np.uint8), torch.randn(5, H, dtype=torch.float16).to("cuda")
    with counting() as log, torch.inference_mode():
        logits = head.logits(states)
        for sampling, rank in RANKS:
            for allowed in (None, bits):
                choose(logits, np.arange(5), sampling, allowed)
            rank_children(logits, np.arange(5), 10, sampling, rank)
        head.likelihoods(states, [1] * 5, 2)
    assert log.launches.keys() <= warm.launches.keys()
    assert not log.of("upload, pageable", "upload, waits")
    assert max(event.nbytes for event in log.events if event.kind.startswith("download")) <= 5 * 42 * 4  # no logits


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
def test_lm_head_computes_rows_in_steps_of_16(rows: int) -> None:
    weight = torch.randn(V, H, dtype=torch.float16).to("cuda")
    states = torch.randn(rows, H, dtype=torch.float16).to("cuda")
    with counting() as log, torch.inference_mode():
        logits = as_output_head(weight)(states)
    [product] = [event for event in log.of("launch") if event.name.startswith("mm")]
    padded = -(-rows // 16) * 16
    assert product.nbytes in {2 * (V * H + padded * (H + extra)) for extra in (0, V)}
    torch.testing.assert_close(logits.cpu(), (states @ weight.t()).cpu())
