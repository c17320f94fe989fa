"""Keys and values of a drafter: text in slots [0, committed), tree nodes unordered in [committed, used).

A layer's keys and values are one tensor, so that a pass's rows are stored by one kernel.  Layers of a stage
write to it as to a stage's own cache (``stage.layers.kv_cache``).

When the text grows, only nodes whose slots it takes are moved.

On a CPU a session's slots are the rows of a memory of its own, which grows.  On a GPU all sessions share
one memory, which is allocated before the first of them: a session's slots are any of its rows, nodes move
to other slots without being copied, and a mask keeps each row of a pass to its own session's columns.  So
a pass over rows of several sessions is like one over rows of one.

Sessions with memories of their own share a pass, too: the linear layers see the rows of all, attention runs session
by session, as in a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.stage.layers.attention import SharedMask
from flowspec_edge.util.tensors import indices

_FIRST_CAPACITY = 256
_WIDTH_STEP = 256  # columns of a mask over a shared memory


@dataclass(frozen=True, slots=True)
class CacheShape:
    """``layers`` times keys and values, [2, capacity, kv_heads, head_dim] each.

    ``groups``: query heads per key/value head.
    ``window``: a row attends only to that many nearest rows, itself included, so that no distance exceeds
    those of training; None: to all.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    groups: int = 1

    @classmethod
    def of(cls, config: DecoderConfig, layers: int, like: Tensor, window: int | None = None) -> CacheShape:
        """Of layers of a model; ``like``: a weight of their dtype, where they compute."""
        heads = config.num_key_value_heads
        return cls(layers, heads, config.head_dim, like.dtype, like.device, window,
                   config.num_attention_heads // heads)

    def mask(self, visible: NDArray[np.bool_]) -> SharedMask:
        """``visible`` [n, m]: what each row of a pass sees of the memory's first m rows."""
        return SharedMask(visible, self.groups, self.dtype, self.device)


class CacheMemory:
    """Rows of keys and values, for one session or, if ``shared``, for all sessions of a draft model.

    layers  [2, rows, kv_heads, head_dim] each: keys, then values
    """

    def __init__(self, shape: CacheShape, rows: int, shared: bool = True) -> None:
        self.shape, self.shared = shape, shared
        self.layers: list[Tensor] = []
        self._free = np.zeros(0, bool)
        self._returned: list[NDArray[np.int64]] = []  # rows that still hold a session's values
        self._resize(rows)

    @property
    def rows(self) -> int:
        return len(self._free)

    def take(self, count: int) -> NDArray[np.int64]:
        """The lowest free rows; makes more if they do not suffice."""
        free = np.flatnonzero(self._free)
        if len(free) < count:
            self._resize(max(self.rows + count - len(free), 2 * self.rows))
            free = np.flatnonzero(self._free)
        self._free[free[:count]] = False
        return free[:count]

    def reach(self, rows: int) -> None:
        """Make so many rows, without taking them: for one session that counts its rows by itself."""
        if rows > self.rows:
            self._resize(max(rows, 2 * self.rows))

    def seen(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``width`` rows, [1, kv_heads, width, head_dim] each."""
        keys, values = self.layers[layer][:, :width].transpose(1, 2)[:, None]
        return keys, values

    def give_back(self, rows: NDArray[np.int64]) -> None:
        """Free once they are cleared: a session may end at any time, also while another takes rows."""
        if len(rows):
            self._returned.append(rows)

    def shrink(self, rows: int) -> None:
        """Keep the first ``rows``, which are taken."""
        self._resize(rows)

    @torch.inference_mode()
    def clear_returned(self) -> None:
        """A row that overflowed would reach every pass whose mask is as wide: 0 times NaN is NaN."""
        returned, self._returned = self._returned, []
        if returned:
            rows = np.concatenate(returned)
            for held in self.layers:
                held.index_fill_(1, indices(rows, self.shape.device), 0.0)
            self._free[rows] = True

    def width(self, rows: int) -> int:
        """Columns of a mask over the first ``rows``: beyond 1,024 at most a quarter more."""
        step = max(_WIDTH_STEP, (1 << rows.bit_length()) // 8)
        return min(self.rows, -(-rows // step) * step)

    def widths(self) -> list[int]:
        found = [self.width(1)]
        while found[-1] < self.rows:
            found.append(self.width(found[-1] + 1))
        return found

    def _resize(self, rows: int) -> None:
        if self.shared:
            rows = -(-rows // _WIDTH_STEP) * _WIDTH_STEP
        s, kept = self.shape, min(rows, self.rows)
        layers = []
        for layer in range(s.layers):
            made = torch.zeros((2, rows, s.kv_heads, s.head_dim), dtype=s.dtype, device=s.device)
            if kept:
                made[:, :kept] = self.layers[layer][:, :kept]
            layers.append(made)
        free = np.ones(rows, bool)
        free[:kept] = self._free[:kept]
        self.layers, self._free = layers, free


class Placed(NamedTuple):
    """The rows of a pass: text, then tree nodes.

    visible  bool [n, m]: which of the memory's first m rows each sees
    rows     int64 [n]: the memory's rows that they take
    """

    visible: NDArray[np.bool_]
    rows: NDArray[np.int64]


class PassCache:
    """The memory in a pass over ``rows`` of it, int64 [n], that sees its first ``width`` rows."""

    def __init__(self, memory: CacheMemory, rows: Tensor, width: int) -> None:
        self._memory, self._rows, self._width = memory, rows, width

    def write(self, rows: Tensor, layer_idx: int) -> Tensor:
        """As ``KVCache.write``: keys and values [n, 2, kv_heads, head_dim] of the pass's rows; returns all [2, m,
        kv_heads, head_dim] that it may see."""
        held = self._memory.layers[layer_idx]
        held.index_copy_(1, self._rows, rows.transpose(0, 1))
        return held[:, : self._width]


class PassCaches:
    """Memories of several sessions in a pass with a ``BatchMask``."""

    def __init__(self, caches: Sequence[PassCache], lengths: Sequence[int]) -> None:
        """``lengths``: rows of each session in the pass."""
        self._caches, self._lengths = caches, list(lengths)

    def write(self, rows: Tensor, layer_idx: int) -> list[Tensor]:
        """As ``BatchCache.write``."""
        return [cache.write(own, layer_idx)
                for cache, own in zip(self._caches, rows.split(self._lengths), strict=True)]


class TreeCache:
    """One session's rows of a memory, which is its own by default."""

    def __init__(self, shape: CacheShape, memory: CacheMemory | None = None) -> None:
        self.committed = 0
        self.shape = shape
        self._at = np.zeros(0, np.int64)  # the memory's row of each slot
        self.memory = memory or CacheMemory(shape, _FIRST_CAPACITY, shared=False)
        self._parent: dict[int, int] = {}
        self._slot: dict[int, int] = {}
        self._used = 0
        if not self.memory.shared:
            self._grow(_FIRST_CAPACITY)

    def __del__(self) -> None:
        if hasattr(self, "memory"):  # it is not if there was no memory for it
            self._give_back(0)

    def __contains__(self, node: int) -> bool:
        return node in self._slot

    @property
    def device(self) -> torch.device:
        return self.shape.device

    def reset(self) -> None:
        """Forget text and tree; keep a memory of its own."""
        self.committed = self._used = 0
        self._parent.clear()
        self._slot.clear()
        self._give_back(0)

    def rewind(self, rows: int) -> None:
        """Drop the tree and the text from row ``rows`` on; shrink buffers that are far too large."""
        self.committed = self._used = rows
        self._parent.clear()
        self._slot.clear()
        self._give_back(rows)
        wanted = max(rows, _FIRST_CAPACITY)
        if not self.memory.shared and len(self._at) > 2 * wanted:
            self.memory.shrink(wanted)
            self._at = self._at[:wanted]

    def _give_back(self, kept: int) -> None:
        if self.memory.shared:
            self.memory.give_back(self._at[kept:])
            self._at = self._at[:kept]

    def reroot(self, root: int) -> None:
        """Drop ``root``, which is text now, and every node that is not below it."""
        kept = {root}
        for node in sorted(self._parent):  # a parent's id is smaller than its child's
            if self._parent[node] in kept:
                kept.add(node)
        kept.discard(root)
        self._parent = {node: self._parent[node] for node in self._parent if node in kept}
        self._slot = {node: self._slot[node] for node in self._slot if node in kept}

    def begin(self, new_text: int, nodes: Sequence[tuple[int, int]]) -> Placed:
        """Make room for one forward pass.

        new_text  text rows that the pass appends, before its tree rows
        nodes     (id, parent) of the tree rows; a parent is in the cache, or the root (the last text row)
        """
        start, end = self.committed, self.committed + new_text
        survivors = len(self._slot)
        self.memory.clear_returned()
        self._grow(end + survivors + len(nodes))
        self._compact(end, survivors)
        self.committed = end
        self._used = end + survivors
        for node, parent in nodes:
            if node not in self._slot:
                self._slot[node] = self._used
                self._used += 1
            self._parent[node] = parent
        rows = self._at[[*range(start, end), *(self._slot[node] for node, _ in nodes)]]
        visible = self._mask(start, nodes)
        if not self.memory.shared:
            return Placed(visible, rows)
        own = self._at[: self._used]
        of_all = np.zeros((len(rows), self.memory.width(int(own.max()) + 1)), bool)
        of_all[:, own] = visible
        return Placed(of_all, rows)

    def for_pass(self, placed: Placed) -> PassCache:
        return PassCache(self.memory, indices(placed.rows, self.device), placed.visible.shape[1])

    def mask(self, placed: Placed) -> SharedMask:
        return self.shape.mask(placed.visible)

    def _mask(self, start: int, nodes: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        text = self.committed - start
        mask = np.zeros((text + len(nodes), self._used), dtype=bool)
        mask[:, :start] = True
        mask[:text, start : self.committed] = np.tri(text, dtype=bool)
        mask[text:, start : self.committed] = True
        window = self.shape.window or self._used
        for row in range(max(0, window - start), text):
            mask[row, : start + row + 1 - window] = False
        for row, (node, _) in enumerate(nodes, start=text):
            depth = 0  # below the root
            while node in self._slot and depth < window:  # up to, and not including, the root
                mask[row, self._slot[node]] = True
                node = self._parent[node]
                depth += 1
            mask[row, : max(0, self.committed + depth - window)] = False
        return mask

    def _compact(self, first: int, count: int) -> None:
        """Move the tree's ``count`` rows into slots [first, first + count)."""
        wanted = range(first, first + count)
        displaced = [node for node, slot in self._slot.items() if slot not in wanted]
        if not displaced:
            return
        taken = set(self._slot.values())
        free = [slot for slot in wanted if slot not in taken]
        held = [self._slot[node] for node in displaced]
        if self.memory.shared:
            self._at[[*free, *held]] = self._at[[*held, *free]]
        else:
            target, source = indices(free, self.device), indices(held, self.device)
            for states in self.memory.layers:
                states.index_copy_(1, target, states.index_select(1, source))
        self._slot.update(zip(displaced, free, strict=True))

    def _grow(self, needed: int) -> None:
        if needed <= len(self._at):
            return
        wanted = needed if self.memory.shared else max(needed, 2 * len(self._at))
        self._at = np.concatenate([self._at, self.memory.take(wanted - len(self._at))])
