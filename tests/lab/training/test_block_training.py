"""A block drafter's training computes what its drafter computes, from the same weights before they are joined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flowspec_edge.drafting.block.head import BlockConfig, BlockHead
from flowspec_edge.drafting.checkpoint import layer_config
from flowspec_edge.lab.training.differentiable import BlockPass, ContextCache
from flowspec_edge.model.families import QWEN3

TEXT, SLOTS, LAYERS, V, H = 9, 5, 2, 23, 32


def config(convolved: int) -> BlockConfig:
    layer = layer_config({"vocab_size": V, "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": LAYERS,
                          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}, "the test", QWEN3)
    plain = BlockConfig(**vars(layer), captured=(1, 2), block_size=SLOTS, mask_token_id=0, causal=(False, True),
                        windows=(None, 4), draft_vocab_size=V)
    return replace(plain, conv_kernel_size=convolved, conv_group_size=8) if convolved else plain


@pytest.mark.parametrize("convolved", [0, 3])
def test_training_and_drafting_are_one_computation(convolved: int) -> None:
    torch.manual_seed(3)
    head = BlockHead(config(convolved))
    for parameter in head.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter) + (parameter.ndim == 1)
    states, embedded = torch.randn(TEXT, 2 * H), torch.randn(SLOTS, H)
    text, slots = torch.arange(TEXT), torch.arange(TEXT, TEXT + SLOTS)
    visible = [np.random.default_rng(layer).random((SLOTS, TEXT + SLOTS)) < 0.7 for layer in range(LAYERS)]
    for seen in visible:
        seen[:, TEXT:] |= np.eye(SLOTS, dtype=bool)
    with torch.no_grad():
        trained = BlockPass(head)
        older = list(trained.keys_values(states[None], text[None]))
        masks = [torch.from_numpy(seen)[None, None] for seen in visible]
        expected = trained(embedded[None], slots[None], masks, ContextCache(older))[0]
        head.prepare()
        shape = head.cache_shape()
        cache = shape.arena(TEXT + SLOTS).take(TEXT + SLOTS)
        for layer, made in enumerate(head.keys_values(states, text)):
            cache.write(made, layer)
        cache.append(TEXT)
        found = head(embedded.clone(), slots, [shape.mask(seen) for seen in visible], cache)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
