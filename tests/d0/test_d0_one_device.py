"""No operation of D0 mixes devices, shown without a GPU; and what leaves the device: ids and scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kits.meta_device import MetaDevice
from transformers import LlamaConfig

from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, EagleHead, eagle_config
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Head
from flowspec_edge.drafting.eagle.head_config import llama_layer
from flowspec_edge.lab.spd.drafter import SpdDrafter
from flowspec_edge.lab.spd.module import SpdModule
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.sampling import sampler
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

V, H, ROWS, LAYERS = 2048, 32, 5, 4
SAMPLINGS = {"greedy": Sampling(), "all": Sampling(1.0, seed=1), "top-p": Sampling(1.0, top_p=0.9, seed=1),
             "top-k": Sampling(0.7, top_k=20, top_p=0.8, seed=1)}


def config(**extra: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=1,
                       num_attention_heads=4, num_key_value_heads=2, bias=True, **extra)


def drafter_on(kind: str, device: str) -> Drafter:
    lm_head = torch.zeros(V, H, dtype=torch.float16, device=device)
    with torch.device(device):
        if kind == "eagle2":
            return EagleDrafter(EagleHead(eagle_config(config().to_dict(), "a head")).half(), lm_head)
        if kind == "eagle3":
            layer = vars(llama_layer(config().to_dict(), "a head"))
            head = Eagle3Head(Eagle3Config(**layer, target_hidden_size=H, draft_vocab_size=V)).half()
            return Eagle3Drafter(head, [0, 1, 2])
        return SpdDrafter(SpdModule(config(target_layers=LAYERS)).half(), lm_head)


def hidden(rows: int) -> Payload:
    return Payload("float16", np.zeros((rows, H), np.float16))


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values are zero here, so every pair of tokens is as close as can be; on a real device few are."""
    monkeypatch.setattr(sampler, "_clearly_ahead", lambda first, second: np.ones(len(first), bool))


@pytest.mark.usefixtures("sure")
@pytest.mark.parametrize("name", SAMPLINGS)
def test_of_an_output_only_few_numbers_a_row_come_down(name: str) -> None:
    with MetaDevice() as device:
        head = LmHead(torch.zeros(V, H, dtype=torch.float16, device="meta"))
        device.uploads.clear()
        states = head.states(hidden(ROWS))
        if name == "top-k":  # of equal logits the definition decides, row by row
            assert len(sampler._draw_top_k(head.logits(states), np.arange(ROWS), SAMPLINGS[name])) == ROWS
        else:
            assert len(head.choose(head.logits(states), np.arange(ROWS), SAMPLINGS[name])) == ROWS
    assert device.uploads == [(ROWS, H)]
    assert len(device.downloads) == 1
    assert all(shape[0] == ROWS and np.prod(shape[1:], initial=1) <= 42 for shape in device.downloads)


@pytest.mark.parametrize("rank", ["draft", "noise"])
@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "spd"])
def test_of_a_draft_pass_only_children_and_scores_come_down(kind: str, rank: Rank) -> None:
    """The text, a level below the root, the root again after a commit; nothing waits but the ranking."""
    with MetaDevice() as device:
        drafter = drafter_on(kind, "meta")
        drafter.reset(Sampling(1.0, seed=3), rank, 0.6)
        states = torch.zeros(3, H, dtype=torch.float16, device="meta")
        for layer in (0, 1, 2):
            drafter.tap(Tap(1, 0, 0, layer, np.arange(4, dtype=np.int32), hidden(4)))
        drafter.commit([1], None)
        drafter.commit([2, 3, 4], states, [0, 1, 2])
        device.downloads.clear()
        passes = [(DraftNode(0, -1, 4, 3, 3),), (DraftNode(1, 0, 7, 4), DraftNode(2, 0, 8, 4))]
        for nodes in passes:
            drafter.expand(DraftRequest(0, nodes, 10))
        drafter.commit([7], states[:1], [3])
        drafter.expand(DraftRequest(1, (DraftNode(1, -1, 7, 4), DraftNode(3, 1, 9, 5)), 10))
    assert device.downloads == [(1, 20), (2, 20), (2, 20)]
