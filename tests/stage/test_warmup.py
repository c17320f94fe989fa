"""A warm-up runs the kernels of real segments, and leaves no memory allocated."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quantkit import DEVICES
from stagekit import Book, engines, random_tokens, through
from tiny import tiny_llama

from flowspec_edge.stage.engine import ROWS, StageEngine, warm_up
from flowspec_edge.stage.layers.kv_cache import KVCache
from flowspec_edge.stage.shard import load_shard


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


# In a separate process: other tests have already warmed this one up.
_NEW_LIBRARIES = """
import sys
from pathlib import Path
from stagekit import Book, engines, random_tokens, through
from flowspec_edge.stage.engine import warm_up

def libraries():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {name for line in lines if ".so" in (name := line.rpartition(" ")[2])}

for dtype in ("fp32", "bf16", "fp16"):
    chain = engines(Path(sys.argv[1]), 1, dtype)
    warm_up(chain[0].shard)
    known, book = libraries(), Book()
    for rows in (2, 33, 200):
        through(chain, book.text(random_tokens(rows, 97, seed=rows)))
    print(dtype, sorted(libraries() - known))
"""


@pytest.mark.soak  # it imports for long
def test_segments_of_other_lengths_read_no_library_that_the_warm_up_has_not(tmp_path: Path) -> None:
    """The stage reports ready after it, under a watchdog: a board reads libraries slowly from its card."""
    path = tiny_llama(tmp_path, layers=2, hidden=32)
    done = subprocess.run([sys.executable, "-c", _NEW_LIBRARIES, str(path)], capture_output=True, text=True,
                          check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.splitlines() == ["fp32 []", "bf16 []", "fp16 []"]
