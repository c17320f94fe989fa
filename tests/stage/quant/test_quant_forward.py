"""Whole models with 4-bit linears against transformers' models with the same weights, written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kits.int4_matrices import DEVICES
from kits.tiny_models import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from flowspec_edge.stage.quant.base import KINDS, Kind
from flowspec_edge.stage.quant.schemes import scheme


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_written_out_weights(family: str, kind: Kind, device: str,
                                                     tmp_path: Path) -> None:
    """In float32, for a prompt and for single tokens behind it; Qwen2's linears have biases."""
    path = tiny_model(family, tmp_path, layers=2)
    chosen = scheme(kind)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for _ in range(2))
    replaced = biased = 0
    for name, module in list(ours.model.layers.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if module.bias is not None:
            nn.init.normal_(module.bias)
            theirs.model.layers.get_submodule(name).bias.data = module.bias.data
            biased += 1
        stored = chosen.quantise(module.weight.data)
        linear = chosen.linear(*module.weight.shape, module.bias is not None, torch.float32, device)
        linear.fill(stored, module.bias)
        ours.model.layers.set_submodule(name, linear)
        theirs.model.layers.get_submodule(name).weight.data = chosen.dequantise(stored)
        replaced += 1
    assert (replaced, biased) == (2 * 7, 2 * 3 if family == "qwen2" else 0)
    ours = ours.to(device)
    ids = torch.arange(3, 27)[None]
    with torch.inference_mode():
        expected = theirs(ids).logits
        prompt = ours(ids[:, :20].to(device), use_cache=True)
        found = [prompt.logits]
        found += [ours(ids[:, i:i + 1].to(device), past_key_values=prompt.past_key_values).logits
                  for i in range(20, 24)]
    assert (torch.cat(found, dim=1).cpu() - expected).abs().max() < 1e-4
