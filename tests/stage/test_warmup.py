"""A warm-up runs the kernels of real segments, and leaves no session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.int4_matrices import DEVICES
from kits.stages import Book, engines, random_tokens, through
from kits.tiny_models import tiny_llama

from flowspec_edge.messages import Open
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.families import self_attention
from flowspec_edge.stage.layers import attention
from flowspec_edge.stage.preparation import warm_up
from flowspec_edge.stage.shard import load_shard


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_layers_run_and_nothing_is_left(stage: int, device: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path, layers=6, hidden=32)
    shard = load_shard(path, stage, 3, "fp32", device, row_step=16)
    engine = StageEngine(shard, 300)
    seen: list[tuple[int, int]] = []  # rows, length of the text

    def attend(queries: torch.Tensor, held: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append((len(queries), held.shape[1]))
        return attention.attend(queries, held, *others)

    monkeypatch.setattr(self_attention, "attend", attend)
    warm_up(engine)
    # Rows are padded to 16; the last pass is at the full length.
    assert seen == [(rows, text) for rows, text in ((16, 1), (16, 16), (64, 300)) for _ in shard.modules]
    assert (engine.sessions, engine.retained, engine.cache_rows) == ((), {}, 300)
    assert set(engine.counters.values()) == {0}


def test_what_comes_after_is_what_would_have_come(tmp_path: Path) -> None:
    path, text = tiny_llama(tmp_path, layers=2, hidden=32), random_tokens(9, 97, seed=4)
    (cold,), (warm,) = engines(path, 1), engines(path, 1)
    warm_up(warm)
    warm.open(Open(1, 0, 64))
    outputs = [through([engine], Book().text(text))[1].hidden.array for engine in (cold, warm)]
    assert torch.equal(*map(torch.from_numpy, outputs))


# In a separate process: other tests have already warmed this one up.
_NEW_LIBRARIES = """
import sys
from pathlib import Path
from kits.stages import Book, engines, random_tokens, through
from flowspec_edge.messages import Open
from flowspec_edge.stage.preparation import warm_up

def libraries():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {name for line in lines if ".so" in (name := line.rpartition(" ")[2])}

for dtype in ("fp32", "bf16", "fp16"):
    chain = engines(Path(sys.argv[1]), 1, dtype)
    warm_up(chain[0])
    chain[0].open(Open(1, 0, 512))
    known, book = libraries(), Book()
    for rows in (2, 33, 200):
        through(chain, book.text(random_tokens(rows, 97, seed=rows)))
    print(dtype, sorted(libraries() - known))
"""


@pytest.mark.soak  # it imports for long
def test_segments_of_other_lengths_read_no_new_library(tmp_path: Path) -> None:
    """The stage reports ready after it, under a watchdog: a board reads libraries slowly from its card."""
    path = tiny_llama(tmp_path, layers=2, hidden=32)
    done = subprocess.run([sys.executable, "-c", _NEW_LIBRARIES, str(path)], capture_output=True, text=True,
                          check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.splitlines() == ["fp32 []", "bf16 []", "fp16 []"]
