"""Nothing in a pass mixes devices: on meta tensors an operation with one from the CPU is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from shardkit import cut
from stagekit import Book, random_tokens
from tiny import tiny_model

from flowspec_edge.stage import forward, rows
from flowspec_edge.stage.cache import KVCache
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.stage.staging import Pace

META = torch.device("meta")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [None, "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_pass_and_its_cache(family: str, kind: str | None, fused: bool, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path / "model", layers=2, hidden=128, vocab=97)
    if kind is not None:
        cut(path, tmp_path / "cut", 1, kind)
        path = tmp_path / "cut"
    shard = load_shard(path, 0, 1, "bf16", "meta", fused=fused)
    cache = KVCache(shard.layers, shard.kv_heads, shard.head_dim, 64, shard.dtype, META)
    segment = Book().text(random_tokens(9, 97, seed=1))
    mask, _ = rows.visible(segment, cache.numbers)
    hidden = forward.layers(shard, cache, forward.inputs(shard, segment), segment.positions, mask,
                            lambda layer, inputs: None, lambda: True, Pace.of(META))
    assert hidden is not None
    out = forward.outputs(shard, hidden)
    assert (out.shape, out.dtype, out.device.type) == ((9, 128), torch.bfloat16, "meta")
    cache.append(segment.numbers)
    assert cache.keep(np.arange(9) % 3 > 0) == 3
    cache.move(32, np.arange(4))
    assert {layer.device.type for layer in cache.rows()} == {"meta"}


def test_a_mixture_would_be_refused(tmp_path: Path) -> None:
    """The test above can fail."""
    shard = load_shard(tiny_model("llama", tmp_path, layers=1, hidden=32), 0, 1, "fp32", "meta", fused=True)
    with pytest.raises(RuntimeError, match="device"), torch.inference_mode():
        forward.outputs(shard, torch.zeros(3, 32)).sum() + shard.modules[0].o_proj(torch.zeros(3, 32)).sum()
