"""A stage's time for 16 tree rows over 200 cached rows, against transformers' layers with the same tokens.

Both run in this process, in turn.  The stage's time includes checks, commits and the mask.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from flowspec_edge.messages import Open, Output, Segment, pack_bits
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.util.tensors import to_torch
from microbench._common import Row, print_rows

ROWS = 16
CACHED = 200
VOCABULARY = 512


def stage_forward(hidden: int = 192, layers: int = 8, heads: int = 6, kv_heads: int = 6,
                  repeats: int = 60) -> list[Row]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(Path(directory))
        engine = StageEngine(load_shard(directory, 0, 1, "fp32"))
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=CACHED + ROWS).astype(np.int32)
    ours = _stage(engine, tokens)
    theirs, crop = _transformers(model, tokens)
    difference = float((ours() - theirs()).abs().max())
    if difference > 1e-3:
        raise AssertionError(f"the stage and transformers differ by {difference}")
    mine, other = _interleaved(ours, theirs, crop, repeats)
    name = f"stage forward, {ROWS} rows, {CACHED} cached, {layers} x {hidden}, {heads}/{kv_heads} heads"
    return [
        (name, 1e3 * mine, "ms"),
        ("transformers' layers, the same tokens", 1e3 * other, "ms"),
        ("stage / transformers", mine / other, "x"),
    ]


def _stage(engine: StageEngine, tokens: np.ndarray) -> Callable[[], Tensor]:
    """Prefill, and return a function that computes the tree as a new segment; earlier trees are dropped."""
    engine.open(Open(session=0, epoch=0, capacity=1024))
    paths, depths = _tree()
    runs = 0

    def compute(rows: np.ndarray, positions: np.ndarray, bits: list[int], first: int, base: int,
                committed: np.ndarray) -> Tensor:
        nonlocal runs
        n = len(rows)
        segment = Segment(
            session=0, epoch=0, run=runs, first=first, stop=first + n,
            numbers=np.arange(first, first + n, dtype=np.int32), positions=positions, base=base,
            bits=pack_bits(bits, n), committed=committed, tokens=rows,
        )
        runs += 1
        admitted = engine.admit(segment)
        assert admitted is not None
        [(_, output, *_)] = engine.compute([admitted])
        assert isinstance(output, Output)
        return to_torch(output.hidden)

    text = np.arange(CACHED, dtype=np.int32)
    no_commits = text[:0]
    compute(tokens[:CACHED], text, [(2 << i) - 1 for i in range(CACHED)], 0, 0, no_commits)

    def tree() -> Tensor:
        first = CACHED + ROWS * (runs - 1)
        return compute(tokens[CACHED:], (CACHED + depths).astype(np.int32), paths, first, first,
                       text if runs == 1 else no_commits)

    return tree


def _transformers(model: LlamaForCausalLM, tokens: np.ndarray
                  ) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """Prepare the same work as :func:`_stage` with LlamaModel, DynamicCache and a 4D mask.

    Return a function that computes the tree, and one that removes its rows.
    """
    paths, depths = _tree()
    cache = DynamicCache(config=model.config)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    positions = torch.from_numpy(CACHED + depths)[None]
    sees_row = torch.tensor([[path >> j & 1 for j in range(ROWS)] for path in paths], dtype=torch.bool)
    visible = torch.cat([torch.ones(ROWS, CACHED, dtype=torch.bool), sees_row], dim=1)
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
    with torch.inference_mode():
        model.model(ids[:, :CACHED], past_key_values=cache, use_cache=True)

    def tree() -> Tensor:
        with torch.inference_mode():
            out = model.model(ids[:, CACHED:], attention_mask=mask, position_ids=positions,
                              past_key_values=cache, use_cache=True).last_hidden_state[0]
        return torch.as_tensor(out)

    return tree, lambda: cache.crop(-ROWS)


def _tree() -> tuple[list[int], np.ndarray]:
    """Return each node's path from the root of a binary tree, a bit a node, and its depth."""
    paths = [1]
    for i in range(1, ROWS):
        paths.append(1 << i | paths[(i - 1) // 2])
    return paths, np.array([path.bit_count() - 1 for path in paths], dtype=np.int64)


def _interleaved(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], crop: Callable[[], None],
                 repeats: int) -> tuple[float, float]:
    """Return the median seconds of each; ``crop`` undoes the last call of ``theirs`` and is not timed."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        crop()
        for run, record in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            run()
            record.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    logging.disable_progress_bar()
    for kv_heads in (6, 2):
        print_rows(stage_forward(kv_heads=kv_heads))


if __name__ == "__main__":
    main()
