"""A warm-up computes what will be computed, and leaves nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from quantkit import DEVICES
from stagekit import Book, engines, random_tokens, through
from tiny import tiny_llama

from flowspec_edge.stage.cache import KVCache
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.stage.warmup import ROWS, warm_up


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_layers_run_and_nothing_is_left(stage: int, device: str, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, layers=6, hidden=32)
    shard = load_shard(path, stage, 3, "fp32", device, fused=True)
    gc.collect()
    engine, before = StageEngine(shard), sum(type(o) in (KVCache, StageEngine) for o in gc.get_objects())
    seen: list[tuple[int, ...]] = []
    hooks = [module.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
             for module in shard.modules]
    warm_up(shard)
    for hook in hooks:
        hook.remove()
    assert seen == [(1, rows, 32) for rows in (16, 16, 64) for _ in shard.modules]  # rows are padded to 16
    assert ROWS == (1, 16, 64)
    assert sum(type(o) in (KVCache, StageEngine) for o in gc.get_objects()) == before
    assert engine.sessions == ()
    assert engine.cache_bytes == 0
    assert set(engine.counters.values()) == {0}


def test_what_comes_after_is_what_would_have_come(tmp_path: Path) -> None:
    path, text = tiny_llama(tmp_path, layers=2, hidden=32), random_tokens(9, 97, seed=4)
    (cold,), (warm,) = engines(path, 1), engines(path, 1)
    warm_up(warm.shard)
    outputs = [through([engine], Book().text(text))[1].hidden.array for engine in (cold, warm)]
    assert torch.equal(*map(torch.from_numpy, outputs))
