"""The KV caches against lists of rows."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kits.hypothesis_examples import examples
from torch.utils._python_dispatch import TorchDispatchMode

from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.stage.layers.kv_cache import KVPass
from flowspec_edge.stage.layers.stage_cache import StageCache, StageMemory

LAYERS, KV_HEADS, HEAD_DIM = (2, 5), 2, 4


def memory(rows: int) -> StageMemory:
    kind = KeysValues(KV_HEADS, 1, HEAD_DIM)
    return StageMemory({kind: kind.arena(range(*LAYERS), torch.float32, torch.device("cpu"), rows)})


def filled(rows: int, capacity: int = 64) -> tuple[StageCache, torch.Tensor]:
    """A cache with ``rows`` random rows, and what it should hold: [layers, 2, rows, kv_heads, head_dim]."""
    cache = memory(capacity).take(capacity, capacity)
    truth = torch.randn(LAYERS[1] - LAYERS[0], 2, rows, KV_HEADS, HEAD_DIM)
    write(cache, truth, np.arange(rows, dtype=np.int32) * 3)
    return cache, truth


@torch.inference_mode()  # as a stage computes
def write(cache: StageCache, rows: torch.Tensor, numbers: np.ndarray) -> None:
    for i, (keys, values) in enumerate(rows):
        held = cache.parts[0].write(torch.stack((keys, values), 1), LAYERS[0] + i)
        assert held.shape == (2, len(cache) + len(numbers), KV_HEADS, HEAD_DIM)
    cache.append(numbers, numbers)


@given(masks=st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=4), rows=st.integers(0, 20))
@examples(100, quick=18)
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


ROW = 3 * 2 * KV_HEADS * HEAD_DIM * 4  # bytes


class Arenas(RuleBasedStateMachine):
    """Any number of caches in one arena, which is too small at first: each keeps its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.most, self.made = memory(8), 8, 0
        self.caches: list[tuple[StageCache, list[torch.Tensor]]] = []  # rows [layers, 2, kv_heads, head_dim]

    def some(self, data: st.DataObject) -> tuple[StageCache, list[torch.Tensor]]:
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    @rule(capacity=st.integers(1, 700))
    def take(self, capacity: int) -> None:
        cache = self.memory.take(capacity, 0)
        assert (len(cache), cache.capacity) == (0, capacity)
        self.caches.append((cache, []))

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.integers(1, 400))
    @torch.inference_mode()  # as a stage computes
    def write(self, data: st.DataObject, count: int) -> None:
        """A pass; other caches may come and go between its layers."""
        cache, held = self.some(data)
        count = min(count, cache.capacity - len(held))
        if not count:
            return
        rows = torch.arange(self.made, self.made + count * ROW // 4, dtype=torch.float32)
        rows = rows.view(count, 3, 2, KV_HEADS, HEAD_DIM)
        self.made += count * ROW // 4
        cache.reserve(count)
        for layer in range(*LAYERS):
            seen = cache.parts[0].write(rows[:, layer - LAYERS[0]], layer)
            assert torch.equal(seen, torch.stack([*held, *rows])[:, layer - LAYERS[0]].transpose(0, 1))
            if layer == LAYERS[0]:
                self.take(data.draw(st.integers(1, 300)))
        numbers = np.arange(len(held), len(held) + count, dtype=np.int32)
        cache.append(numbers, numbers)
        held.extend(rows)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def retain(self, data: st.DataObject, seed: int) -> None:
        cache, held = self.some(data)
        slots = np.flatnonzero(np.random.default_rng(seed).random(len(held)) < 0.6)
        if not len(slots):
            return
        cache.retain(slots)
        held[:] = [held[slot] for slot in slots]
        assert (cache.capacity, cache.numbers.tolist()) == (len(slots), list(range(len(slots))))

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), more=st.integers(0, 600))
    def widen(self, data: st.DataObject, more: int) -> None:
        cache, held = self.some(data)
        cache.retain(np.arange(len(held)))
        self.memory.widen(cache, len(held) + more, 0)
        assert cache.capacity == len(held) + more

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        cache, _ = self.some(data)
        self.caches = [pair for pair in self.caches if pair[0] is not cache]
        self.memory.give_back(cache)

    @invariant()
    def each_has_its_rows(self) -> None:
        for cache, held in self.caches:
            found = torch.stack(cache.rows())
            assert len(cache) == len(held)
            if held:
                assert torch.equal(found, torch.stack(held, 2))

    @invariant()
    def it_grows_only_if_it_must(self) -> None:
        self.most = max(self.most, sum(cache.capacity for cache, _ in self.caches))
        assert self.memory.rows == self.most
        assert self.memory.nbytes == self.most * ROW


TestArenas = Arenas.TestCase
TestArenas.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class Allocations(TorchDispatchMode):
    """The size of each tensor that is made, in slots."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.new_empty.default, torch.ops.aten.clone.default):
            self.slots.append(made.numel() // (2 * KV_HEADS * HEAD_DIM))
        return made


def test_moving_takes_little_memory_and_growing_a_layer() -> None:
    held = memory(3000)
    first, second = held.take(1000, 0), held.take(1000, 0)
    write(second, torch.randn(3, 2, 1000, KV_HEADS, HEAD_DIM), np.arange(1000, dtype=np.int32))
    held.give_back(first)
    with Allocations() as made:
        caches = [held.take(2000, 0)]
    assert made.slots == 3 * [256, 256, 256, 232]
    with Allocations() as made:
        caches.append(held.take(10, 0))
    assert made.slots == 3 * [3010]


def test_a_cache_that_nobody_holds_gives_its_range_and_its_arena_back_at_once() -> None:
    """Not when the collector looks for circles, which a process with many objects does rarely."""
    arena = KeysValues(KV_HEADS, 1, HEAD_DIM).arena(range(*LAYERS), torch.float32, torch.device("cpu"), 8)
    first, second = arena.take(5), arena.take(3)
    assert (first.start, second.start, arena.missing(5)) == (0, 5, 5)
    gc.disable()
    try:
        del first
        assert (arena.missing(5), arena.take(5).start, arena.rows) == (0, 0, 8)
        layer = weakref.ref(arena.layers[0])
        del arena
        assert layer() is not None  # the second cache is left
        del second
        assert layer() is None
    finally:
        gc.enable()


@given(given_slots=st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=6, unique=True), min_size=1, max_size=5),
       kept_in=st.sampled_from(["16bit", "int8"]))
@examples(60, quick=12)
def test_rows_go_to_any_slots_of_a_cache_that_grows(given_slots: list[list[int]], kept_in: Any) -> None:
    """Slots that nothing was written to hold zeros, for masks that hide them."""
    arena = KeysValues(KV_HEADS, 1, HEAD_DIM, kept_in).arena(range(*LAYERS), torch.float32, torch.device("cpu"), 3)
    before, cache = arena.take(3), arena.take(0)
    truth = torch.zeros(2, 40, KV_HEADS, HEAD_DIM)
    for slots in given_slots:
        held = cache.capacity
        arena.reach(cache, max(slots) + 1)
        assert cache.capacity == (max(max(slots) + 1, 2 * held) if max(slots) >= held else held)
        rows = torch.randint(-9, 9, (len(slots), 2, KV_HEADS, HEAD_DIM)).float()
        rows[..., 0] = 127  # so that int8 keeps whole numbers to a last bit of 127
        truth[:, slots] = rows.transpose(0, 1)
        seen = KVPass(cache, torch.tensor(slots), cache.capacity).write(rows, LAYERS[1] - 1)
        torch.testing.assert_close(seen, truth[:, : cache.capacity], rtol=0.02, atol=0.5 * (kept_in == "int8"))
        assert torch.equal(seen, cache.read(LAYERS[1] - 1, cache.capacity))
        assert not cache.read(LAYERS[0], cache.capacity).any()
    arena.give_back(before)
    last, kept = cache.start, cache.read(LAYERS[1] - 1, 1).clone()
    cache.capacity = 1
    arena.trim()
    assert (arena.rows, arena.nbytes) == (last + 1, (last + 1) * arena.row_bytes)
    assert torch.equal(cache.read(LAYERS[1] - 1, 1), kept)


def test_only_numbers_that_are_held_have_slots() -> None:
    cache, _ = filled(4)  # numbers 0, 3, 6, 9
    for wanted in ([0, 4], [9, 10], [3, 3], [6, 3], [12]):
        assert cache.slots(np.array(wanted, dtype=np.int32)) is None
    found = cache.slots(np.array([3, 9], dtype=np.int32))
    assert found is not None
    assert found.tolist() == [1, 3]


def test_the_rows_behind_a_dropped_one_keep_their_numbers_and_positions() -> None:
    cache = StageCache(8, [])
    cache.append(np.arange(5, dtype=np.int32), np.array([0, 1, 2, 2, 3], np.int32))
    assert cache.keep(np.array([True, True, False, True, True])) == 1
    assert (cache.numbers.tolist(), cache.positions.tolist()) == ([0, 1, 3, 4], [0, 1, 2, 3])
