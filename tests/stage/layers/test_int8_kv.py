"""Keys and values in 8 bits: the rounding, the cache's operations, and tokens that are those of generate."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.cases import strategies
from kits.hypothesis_examples import examples
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.bench.weight_loss import weight_losses
from flowspec_edge.lab.plain import PlainDecoder, load_reference_model
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.sharding.job import run
from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.layers.kv_cache import KVArena, from_int8, in_int8, row_bytes
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.strategies.registry import STRATEGIES

CPU, HEADS, WIDTH, PROMPT, NEW = torch.device("cpu"), 2, 16, [5, 17, 42, 3, 3, 58, 11], 10
SAMPLINGS = (Sampling(), Sampling(1.0, seed=4))
PIPELINED = [name for name, strategy in STRATEGIES.items() if strategy.parallelism == "pipeline"]


@settings(deadline=None)
@given(seed=st.integers(0, 999), size=st.floats(1e-2, 1e4),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_value_is_within_half_a_step(seed: int, size: float, dtype: torch.dtype) -> None:
    """Of 127 steps to the largest of its head, and what the dtype rounds; zeros stay zeros."""
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, HEADS, WIDTH)) * size).to(dtype)
    values[2] = 0
    found = from_int8(in_int8(values), dtype)
    assert (found.dtype, found.shape) == (dtype, values.shape)
    most = values.double().abs().amax(-1, keepdim=True)
    off = (found.double() - values.double()).abs()
    assert (off <= most * (0.505 / 127 + 2 * torch.finfo(dtype).eps)).all()
    assert not found[2].any()


@examples(40, quick=16)
@given(st.data())
@torch.inference_mode()  # as the engine computes
def test_every_operation_against_a_list_of_rows(data: st.DataObject) -> None:
    """write, update, append, keep, retain; a pass sees the rounded values of all rows, its own included."""
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    arena = KVArena(range(3, 5), HEADS, WIDTH, torch.float32, CPU, "int8", 40)
    cache = arena.take(40)
    held: list[torch.Tensor] = []  # [2 layers, 2, heads, width] each
    for step in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["write", "keep", "retain"]))
        if action == "write" and len(held) < 30:
            n = data.draw(st.integers(1, 5))
            rows = torch.from_numpy(random.normal(size=(n, 2, 2, HEADS, WIDTH))).float()
            expected = torch.stack([*held, *(from_int8(in_int8(row), torch.float32) for row in rows)])
            for layer in (0, 1):
                found = cache.write(rows[:, layer], layer + 3)
                for part in (0, 1):
                    assert torch.equal(found[part], expected[:, layer, part]), step
            cache.append(n)
            held = list(expected)
        elif action == "keep" and held:
            mask = random.random(len(held)) < 0.7
            cache.keep(mask)
            held = [row for row, stays in zip(held, mask, strict=True) if stays]
        elif action == "retain" and held:
            cache.retain(len(cache))
            assert cache.capacity == len(held)
            arena.widen(cache, 40)
        assert len(cache) == len(held)
    assert arena.nbytes == 2 * 40 * row_bytes(HEADS, WIDTH, 4, "int8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("kv"), layers=3)


@cache
def sharded(base: Path, kv_cache: Any) -> Path:
    source, out = open_source(str(base)), base / f"cut-{kv_cache}"
    run(make_plan(source, recipe_for(source, "fp32", kv_cache=kv_cache), ranges_for(3, 2, None)), out)
    return out


@cache
def cluster(base: Path) -> VirtualCluster:
    return VirtualCluster(sharded(base, "int8"), 2, load_profile("paper-7b"))


@cache
def expected(base: Path) -> list[list[int]]:
    """By transformers' whole model, which rounds keys and values in its attention: greedy, and drawn from it."""
    model, ids = load_reference_model(sharded(base, "int8"), "fp32"), torch.tensor([PROMPT])
    model.generation_config.eos_token_id = None
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    return [greedy[0, len(PROMPT):].tolist(),
            PlainDecoder(sharded(base, "int8")).generate(PROMPT, NEW, SAMPLINGS[1])[0]]


@pytest.mark.parametrize("name", strategies(*PIPELINED))
def test_tokens_are_those_of_generate(base: Path, name: str) -> None:
    for sampling, tokens in zip(SAMPLINGS, expected(base), strict=True):
        assert cluster(base).generate(Request(PROMPT, name, NEW, sampling)).tokens == tokens


def test_the_loss_is_that_of_the_rounding(base: Path) -> None:
    text = [[(11 * i) % 290 for i in range(40)]]
    lost, kept = (weight_losses(OpenModel(sharded(base, bits)), OpenModel(base), text)[0]
                  for bits in ("int8", "16bit"))
    assert kept.kl == pytest.approx(0, abs=1e-9)
    with torch.inference_mode():
        p, q = (torch.log_softmax(load_reference_model(sharded(base, bits), "fp32")(
            torch.tensor(text)).logits[0, :-1].double(), -1) for bits in ("16bit", "int8"))
    expected = float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)) / 39
    assert expected > 0
    assert lost.kl == pytest.approx(expected, rel=0.05)


def test_the_manifest_counts_its_bytes(base: Path) -> None:
    shard = load_shard(sharded(base, "int8"), 0, 2, "fp32")
    config = shard.config
    arena = KVArena(range(*shard.layers), config.num_key_value_heads, config.head_dim, shard.dtype, CPU, "int8", 10)
    source = open_source(str(base))
    part = make_plan(source, recipe_for(source, "fp32", kv_cache="int8"), ranges_for(3, 2, None)).parts[0]
    assert arena.nbytes == 10 * part.row_bytes
    assert shard.kv_cache == "int8"
