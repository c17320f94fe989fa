"""Tensor-parallel ranks compute what transformers' unsharded model computes.

Each rank is a thread of its own with a real gloo group over loopback; the oracle is transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stagekit import Book, Oracle, assert_cache, assert_rows, random_tokens
from tiny import tiny_llama, tiny_model
from torch import Tensor

from flowspec_edge.errors import FlowspecError, PeerLost, ProtocolError, UsageError
from flowspec_edge.messages import Cancel, Close, Open, Output, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_lm_head, load_shard
from flowspec_edge.stage.tensor_connect import Galaxy, Megatron, TensorKind
from flowspec_edge.stage.tensor_engine import TensorEngine
from flowspec_edge.stage.tensor_group import GlooGroup
from flowspec_edge.stage.tensor_layers import Heads
from flowspec_edge.stage.tensor_shard import load_tensor_shard
from flowspec_edge.tensors import to_torch

KINDS: tuple[TensorKind, ...] = ("megatron", "galaxy")
VOCAB = 97
TEXT = random_tokens(17, VOCAB, seed=1)
T = TypeVar("T")


class Ranks:
    """Ranks of one model, driven together: every call is made on all of them at once."""

    def __init__(self, path: Path, kind: TensorKind, size: int, meet: Path, dtype: str = "fp32") -> None:
        self.groups = groups(size, meet)
        self.shards = [load_tensor_shard(path, kind, group, dtype) for group in self.groups]
        self.engines = [TensorEngine(shard, group)
                        for shard, group in zip(self.shards, self.groups, strict=True)]
        for engine in self.engines:
            engine.open(Open(session=1, epoch=0, capacity=128))

    def through(self, segment: Segment) -> Output:
        """The last rank's output; all ranks must have the very same rows."""

        def compute(engine: TensorEngine) -> Output:
            admitted = engine.admit(segment)
            assert admitted is not None
            taps, output = engine.compute(admitted)
            assert not taps
            assert isinstance(output, Output)
            return output

        outputs = together([lambda engine=engine: compute(engine) for engine in self.engines])
        for output in outputs:
            assert output.numbers.tolist() == segment.numbers.tolist()
            assert np.array_equal(output.hidden.array, outputs[-1].hidden.array)
        return outputs[-1]


def groups(size: int, meet: Path, within: float = 30.0) -> list[GlooGroup]:
    """Ranks that meet at a file below ``meet``."""
    url = f"file://{meet}/group-{size}-{threading.get_ident()}-{len(list(meet.iterdir()))}"
    return [GlooGroup(rank, size, url, "lo", within) for rank in range(size)]


def together(calls: list[Callable[[], T]]) -> list[T]:
    """All results; each call in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def grow(book: Book, nodes: int, vocab: int, seed: int) -> list[int]:
    """A random tree of ``nodes`` rows below the newest committed one."""
    rng = np.random.default_rng(seed)
    tree = book.committed[-1:]
    for _ in range(nodes):
        tree.append(book.add(int(rng.integers(1, vocab)), int(rng.choice(tree))))
    return tree[1:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six query heads over two key/value heads, and an MLP of 100: five ranks divide none of them."""
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=2, hidden=48, heads=6, kv_heads=2, vocab=VOCAB,
                      )


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", range(1, 9))
def test_text_and_trees(model: Path, oracle: Oracle, tmp_path: Path, size: int, kind: TensorKind) -> None:
    """A prompt in two chunks, then trees over several commits; rows rarely divide among the ranks."""
    ranks, book = Ranks(model, kind, size, tmp_path), Book()
    for chunk in (TEXT[:16], TEXT[16:]):
        assert_rows(ranks.through(book.text(chunk)), book, oracle)
    for seed, nodes in enumerate((1, 5, 8, 0, 11)):
        tree = grow(book, nodes, VOCAB, seed)
        assert_rows(ranks.through(book.ledger.seal()), book, oracle)
        if tree:
            book.commit(tree[0])
    hidden = to_torch(ranks.through(book.text([5, 6, 7])).hidden)
    head = load_lm_head(model, "fp32")
    with torch.inference_mode():
        theirs = oracle.model(torch.tensor([list(book.paths[book.committed[-1]])])).logits[0, -3:]
    torch.testing.assert_close(hidden @ head.T, theirs, atol=1e-4, rtol=1e-4)
