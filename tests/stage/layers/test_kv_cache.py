"""The KV cache against plain numpy indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from propertykit import examples
from torch.utils._python_dispatch import TorchDispatchMode

from flowspec_edge.errors import FlowspecError
from flowspec_edge.stage.layers.kv_cache import KVCache

LAYERS, KV_HEADS, HEAD_DIM = (2, 5), 2, 4


def filled(rows: int, capacity: int = 64) -> tuple[KVCache, torch.Tensor]:
    """A cache with ``rows`` random rows, and what it should hold: [layers, 2, rows, kv_heads, head_dim]."""
    cache = KVCache(LAYERS, KV_HEADS, HEAD_DIM, capacity, torch.float32, torch.device("cpu"))
    truth = torch.randn(LAYERS[1] - LAYERS[0], 2, rows, KV_HEADS, HEAD_DIM)
    write(cache, truth, np.arange(rows, dtype=np.int32) * 3)
    return cache, truth


@torch.inference_mode()  # as a stage computes
def write(cache: KVCache, rows: torch.Tensor, numbers: np.ndarray) -> None:
    for i, (keys, values) in enumerate(rows):
        all_keys, all_values = cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
                                            LAYERS[0] + i)
        assert all_keys.shape == all_values.shape == (1, KV_HEADS, len(cache) + len(numbers), HEAD_DIM)
    cache.append(numbers)


@given(masks=st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=4), rows=st.integers(0, 20))
@examples(100, quick=30)
def test_keep_is_boolean_indexing(masks: list[int], rows: int) -> None:
    cache, truth = filled(rows)
    numbers = cache.numbers.copy()
    for bits in masks:
        mask = np.array([bits >> i & 1 for i in range(len(numbers))], dtype=bool)
        assert cache.keep(mask) == (~mask).sum()
        numbers, truth = numbers[mask], truth[:, :, torch.from_numpy(mask)]
        assert cache.numbers.tolist() == numbers.tolist()
        assert torch.equal(torch.stack(cache.rows()), truth)
        more = torch.randn(LAYERS[1] - LAYERS[0], 2, 1, KV_HEADS, HEAD_DIM)
        new = np.array([100 + len(truth) if not len(numbers) else numbers[-1] + 1], dtype=np.int32)
        write(cache, more, new)
        numbers, truth = np.append(numbers, new), torch.cat([truth, more], dim=2)
        assert torch.equal(torch.stack(cache.rows()), truth)


class Writes(TorchDispatchMode):
    """The number of slots that each in-place write covered."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.slots.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("holes", "moved"), [([], []), ([9], []), ([4], [5]), ([4, 6], [4]), ([8], [1])])
def test_only_displaced_rows_are_written(holes: list[int], moved: list[int]) -> None:
    cache, _ = filled(10)
    mask = np.ones(10, dtype=bool)
    mask[holes] = False
    with Writes() as writes:
        cache.keep(mask)
    assert writes.slots == moved * (LAYERS[1] - LAYERS[0])


@given(mask=st.integers(0, 2**12 - 1), spare=st.integers(0, 9), held=st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_move_takes_some_rows_into_other_memory(mask: int, spare: int, held: int) -> None:
    cache, truth = filled(held)
    slots = np.array([i for i in range(held) if mask >> i & 1], dtype=np.int64)
    assert (cache.slots(cache.numbers[slots]) == slots).all()
    cache.move(len(slots) + spare, slots)
    assert cache.numbers.tolist() == list(range(len(slots)))
    assert cache.capacity == len(slots) + spare
    assert cache.nbytes == 3 * 2 * cache.capacity * KV_HEADS * HEAD_DIM * 4
    truth = truth[:, :, torch.from_numpy(slots)]
    assert torch.equal(torch.stack(cache.rows()), truth)
    if spare:
        more = torch.randn(3, 2, spare, KV_HEADS, HEAD_DIM)
        write(cache, more, len(slots) + np.arange(spare, dtype=np.int32))
        assert torch.equal(torch.stack(cache.rows()), torch.cat([truth, more], dim=2))


class Allocations(TorchDispatchMode):
    """The size of each tensor that is made, in slots."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.new_empty.default, torch.ops.aten.index_select.default):
            made = func(*args, **(kwargs or {}))
            self.slots.append(made.numel() // (2 * KV_HEADS * HEAD_DIM))
            return made
        return func(*args, **(kwargs or {}))


def test_move_never_makes_more_than_a_layer_at_once() -> None:
    cache, _ = filled(10)
    with Allocations() as made:
        cache.move(40, np.arange(7))
    assert made.slots == 3 * [40, 7]


def test_only_numbers_that_are_held_have_slots() -> None:
    cache, _ = filled(4)  # numbers 0, 3, 6, 9
    for wanted in ([0, 4], [9, 10], [3, 3], [6, 3], [12]):
        assert cache.slots(np.array(wanted, dtype=np.int32)) is None
    found = cache.slots(np.array([3, 9], dtype=np.int32))
    assert found is not None
    assert found.tolist() == [1, 3]


def test_a_pass_that_is_given_up_leaves_no_trace() -> None:
    cache, truth = filled(5)
    junk = torch.randn(1, KV_HEADS, 3, HEAD_DIM)
    cache.update(junk, junk, LAYERS[0])
    assert len(cache) == 5
    assert torch.equal(torch.stack(cache.rows()), truth)


def test_full() -> None:
    cache, _ = filled(6, capacity=8)
    cache.reserve(2)
    with pytest.raises(FlowspecError, match="KV cache is full: 6 rows held, 3 more to come, capacity 8"):
        cache.reserve(3)


def test_nbytes_is_what_is_allocated() -> None:
    cache, _ = filled(0, capacity=8)
    assert cache.nbytes == 3 * 2 * 8 * KV_HEADS * HEAD_DIM * 4
