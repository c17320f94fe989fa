"""The KV cache against plain numpy indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flowspec_edge.errors import FlowspecError
from flowspec_edge.stage.cache import KVCache

LAYERS, KV_HEADS, HEAD_DIM = (2, 5), 2, 4


def filled(rows: int, capacity: int = 64) -> tuple[KVCache, torch.Tensor]:
    """A cache with ``rows`` random rows, and what it should hold: [layers, 2, rows, kv_heads, head_dim]."""
    cache = KVCache(LAYERS, KV_HEADS, HEAD_DIM, capacity, torch.float32, torch.device("cpu"))
    truth = torch.randn(LAYERS[1] - LAYERS[0], 2, rows, KV_HEADS, HEAD_DIM)
    write(cache, truth, np.arange(rows, dtype=np.int32) * 3)
    return cache, truth


def write(cache: KVCache, rows: torch.Tensor, numbers: np.ndarray) -> None:
    for i, (keys, values) in enumerate(rows):
        all_keys, all_values = cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
                                            LAYERS[0] + i)
        assert all_keys.shape == all_values.shape == (1, KV_HEADS, len(cache) + len(numbers), HEAD_DIM)
    cache.append(numbers)


@given(masks=st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=4), rows=st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_keep_is_boolean_indexing(masks: list[int], rows: int) -> None:
    cache, truth = filled(rows)
    numbers = cache.numbers.copy()
    for bits in masks:
        mask = np.array([bits >> i & 1 for i in range(len(numbers))], dtype=bool)
        assert cache.keep(mask) == (~mask).sum()
        numbers, truth = numbers[mask], truth[:, :, torch.from_numpy(mask)]
        assert cache.numbers.tolist() == numbers.tolist()
        assert torch.equal(cache.rows(), truth)
        more = torch.randn(LAYERS[1] - LAYERS[0], 2, 1, KV_HEADS, HEAD_DIM)
        new = np.array([100 + len(truth) if not len(numbers) else numbers[-1] + 1], dtype=np.int32)
        write(cache, more, new)
        numbers, truth = np.append(numbers, new), torch.cat([truth, more], dim=2)
        assert torch.equal(cache.rows(), truth)


class Writes(TorchDispatchMode):
    """How many slots each in-place write covered."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.slots.append(args[0].shape[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("holes", "moved"), [([], []), ([9], []), ([4], [5]), ([4, 6], [4]), ([8], [1])])
def test_only_displaced_rows_are_written(holes: list[int], moved: list[int]) -> None:
    cache, _ = filled(10)
    mask = np.ones(10, dtype=bool)
    mask[holes] = False
    with Writes() as writes:
        cache.keep(mask)
    assert writes.slots == moved


def test_a_pass_that_is_given_up_leaves_no_trace() -> None:
    cache, truth = filled(5)
    junk = torch.randn(1, KV_HEADS, 3, HEAD_DIM)
    cache.update(junk, junk, LAYERS[0])
    assert len(cache) == 5
    assert torch.equal(cache.rows(), truth)


def test_full() -> None:
    cache, _ = filled(6, capacity=8)
    cache.reserve(2)
    with pytest.raises(FlowspecError, match="KV cache is full: 6 rows held, 3 more to come, capacity 8"):
        cache.reserve(3)


def test_nbytes_is_what_is_allocated() -> None:
    cache, _ = filled(0, capacity=8)
    assert cache.nbytes == 3 * 2 * 8 * KV_HEADS * HEAD_DIM * 4
