"""Layers in 16 bits and tapped, against transformers; joined matrices against each alone."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kits.int4_matrices import DEVICES
from kits.sharded_models import cut
from kits.stages import Book, Oracle, engines, random_tokens, through
from kits.tiny_models import tiny_llama, tiny_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from flowspec_edge.lab.plain import load_reference_model
from flowspec_edge.stage.families.norm import Norm
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.util.linears import join
from flowspec_edge.util.tensors import to_torch

VOCAB = 97
@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_leaves_its_inputs_as_they_were(tmp_path: Path, device: str) -> None:
    """Inputs of a layer may be tapped, and are copied when all layers have run."""
    path, text = tiny_llama(tmp_path, layers=3, hidden=32), random_tokens(20, VOCAB, seed=2)
    chain, oracle = engines(path, 1, device=device, row_step=16), Oracle(path)
    taps, _ = through(chain, replace(Book().text(text), taps=(0, 1, 2)))
    assert [tap.layer for tap in taps] == [0, 1, 2]
    for tap in taps:
        expected = torch.stack([oracle.truth(tuple(text[: i + 1])).layer_inputs[tap.layer]
                                for i in range(20)])
        torch.testing.assert_close(to_torch(tap.hidden), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bits_are_no_worse_than_transformers(tmp_path: Path, dtype: str, torch_dtype: torch.dtype,
                                                device: str) -> None:
    path, text = tiny_llama(tmp_path, layers=8, hidden=32), random_tokens(24, VOCAB, seed=1)
    _, output = through(engines(path, 1, dtype, device=device, row_step=16), Book().text(text))
    truth = Oracle(path).forward(text)
    ours = (to_torch(output.hidden).float() - truth).abs().mean()
    theirs = (Oracle(path, torch_dtype).forward(text).float() - truth).abs().mean()
    assert 0 < ours < 1.2 * theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_cpu_norms_in_16_bits_round_as_transformers_do(dtype: torch.dtype) -> None:
    """Plain decoding there is transformers', and texts are compared with its."""
    theirs, ours, rng = LlamaRMSNorm(48, 1e-6), Norm(48, 1e-6), torch.Generator().manual_seed(0)
    weight, rows = torch.randn(48, generator=rng).to(dtype), torch.randn(400, 48, generator=rng).to(dtype)
    for norm in (theirs, ours):
        norm.weight = nn.Parameter(weight, requires_grad=False)
    ours.prepare()
    assert (theirs(rows) != ours(rows)).float().mean() < 1e-3  # of the root, PyTorch's last digit


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_joined_4_bit_matrices_give_what_transformers_gives(kind: str, dtype: str, tmp_path: Path) -> None:
    """transformers' layers multiply with each of the same matrices."""
    path = tiny_model("qwen2", tmp_path / "model", layers=2, hidden=128, heads=4, kv_heads=2, vocab=VOCAB)
    cut(path, tmp_path / "cut", 1, kind)
    text = list(range(1, 25))
    joined = to_torch(through(engines(tmp_path / "cut", 1, dtype), Book().text(text))[1].hidden).float()
    with torch.inference_mode():
        apart = load_reference_model(tmp_path / "cut", dtype).model(torch.tensor([text])).last_hidden_state[0].float()
    assert (apart - joined).abs().max() < (1e-4 if dtype == "fp32" else 0.15)
    assert (apart - joined).abs().mean() < (1e-5 if dtype == "fp32" else 0.02)


@pytest.mark.parametrize("rows", [(64, 64), (128, 64, 48), (48, 64), (64, 0)])
def test_joining_keeps_every_output(rows: tuple[int, ...]) -> None:
    """Also if the kernel's blocks forbid one matrix, and if only some matrices are packed."""
    torch.manual_seed(0)
    x, chosen = torch.randn(5, 64), scheme("int4")
    parts: list[nn.Module] = []
    for n in rows:
        weight = torch.randn(n or 64, 64)
        if n:
            linear = chosen.linear(n, 64, bias=False, dtype=torch.float32)
            linear.fill(chosen.quantise(weight))
            parts.append(linear)
        else:
            parts.append(nn.Linear(64, 64))
    with torch.inference_mode():
        expected = torch.cat([part(x) for part in parts], dim=-1)
        whole = join(parts)
        torch.testing.assert_close(whole(x), expected)
    assert (len(list(whole.children())) == 0) == (rows in ((64, 64), (128, 64, 48)))


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True)])
def test_joining_keeps_biases(biases: tuple[bool, bool]) -> None:
    """If only one part has biases, the parts are not joined."""
    torch.manual_seed(0)
    x, chosen, parts = torch.randn(5, 64), scheme("int4"), list[nn.Module]()
    for bias in biases:
        linear = chosen.linear(64, 64, bias=bias, dtype=torch.float32)
        linear.fill(chosen.quantise(torch.randn(64, 64)), torch.randn(64) if bias else None)
        parts.append(linear)
    with torch.inference_mode():
        torch.testing.assert_close(join(parts)(x), torch.cat([part(x) for part in parts], dim=-1))


def test_nothing_is_in_memory_twice(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, layers=3, hidden=136)  # a width that no other test has
    shard = load_shard(path, 0, 1, "fp32")
    gc.collect()
    held = Counter(tuple(t.shape) for t in gc.get_objects() if type(t) is nn.Parameter and not t.is_meta)
    assert held[272, 136] == 3  # q, k and v, with two key/value heads to four; gate or up would be as large
    assert held[544, 136] == 3  # gate and up
    assert held[68, 136] == 0  # k, v
    assert len(shard.modules) == 3
