"""The rows of a drafter in a cache of a stage: text, and the nodes of a tree.

In a stage a node's row becomes text where it is.  A drafter's does not: it was computed from what the drafter itself
said of the row before, the text's row is computed from what the target says.  So rows come and go one by one, in no
order, and a pass may compute a node's row again.  A session therefore gets single slots of a cache
(``stage.layers.kv_cache``), which no row leaves before it is dropped: no keys are moved.

On a GPU all sessions share one cache, which is allocated before the first of them, and a mask keeps each row of a pass
to its own session's slots.  So a pass over rows of several sessions is like one over rows of one.  On a CPU a session
has a cache of its own, which grows.  Such sessions share a pass, too: the linear layers see the rows of all, attention
runs session by session, as in a stage.
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
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.stage.layers.kv_cache import KVArena, KVPass
from flowspec_edge.util.tensors import indices

FIRST_CAPACITY = 256
_WIDTH_STEP = 256  # slots: of the widths of masks over a shared cache


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a draft model keeps of a row: ``kind`` in each of ``layers`` layers.

    The kind's window is that of training, so that no distance exceeds those which the model knows.
    """

    kind: KeysValues
    layers: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_config(cls, config: DecoderConfig, layers: int, like: Tensor, window: int | None = None) -> CacheShape:
        """Return the shape for a model's layers; ``like``: a weight of their dtype, where they compute."""
        heads = config.num_key_value_heads
        kind = KeysValues(heads, config.num_attention_heads // heads, config.head_dim, window=window)
        return cls(kind, layers, like.dtype, like.device)

    def arena(self, rows: int) -> KVArena:
        return self.kind.arena(range(self.layers), self.dtype, self.device, rows)

    def mask(self, visible: NDArray[np.bool_]) -> SharedMask:
        """Make a mask from ``visible`` [n, m]: what each row of a pass sees of the cache's first m slots."""
        return self.kind.shared_mask(visible, self.dtype, self.device)


class CacheMemory:
    """A cache whose slots are given out one by one: to one session or, if ``shared``, to all of a draft model."""

    def __init__(self, shape: CacheShape, rows: int, shared: bool = True) -> None:
        self.shape, self.shared = shape, shared
        self._arena = shape.arena(0)
        self.cache = self._arena.take(0)
        self._free = np.zeros(0, bool)
        self._returned: list[NDArray[np.int64]] = []  # slots that still hold a session's values
        self._reach(rows)

    @property
    def rows(self) -> int:
        return len(self._free)

    @property
    def resized(self) -> int:
        """How often its layers' memory has changed its place."""
        return self._arena.resized

    @property
    def layers(self) -> Sequence[Tensor]:
        """[2, rows, kv_heads, head_dim] each: keys, then values."""
        return self._arena.layers

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the lowest free slots; makes more if they do not suffice."""
        free = np.flatnonzero(self._free)
        if len(free) < count:
            self._reach(self.rows + count - len(free))
            free = np.flatnonzero(self._free)
        self._free[free[:count]] = False
        return free[:count]

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Free once they are cleared: a session may end at any time, also while another takes slots."""
        if len(slots):
            self._returned.append(slots)

    def shrink(self) -> None:
        """Give back memory that is far more than what one session takes."""
        self.clear_returned()
        capacity = max(FIRST_CAPACITY, int(np.flatnonzero(~self._free).max(initial=-1)) + 1)
        if self.rows > 2 * capacity:
            self.cache.capacity = capacity
            self._arena.trim()
            self._free = self._free[:capacity]

    @torch.inference_mode()
    def clear_returned(self) -> None:
        """Zero the rows that were given back.

        A row that overflowed would reach every pass whose mask is as wide: 0 times NaN is NaN.
        """
        returned, self._returned = self._returned, []
        if returned:
            slots = np.concatenate(returned)
            for layer in self.layers:
                layer.index_fill_(1, indices(slots, self.shape.device), 0.0)
            self._free[slots] = True

    def width(self, rows: int) -> int:
        """Columns of a mask over the first ``rows`` slots.

        Of a shared cache there are few widths; beyond 1,024 they are a quarter more at most.
        """
        if not self.shared:
            return rows
        step = max(_WIDTH_STEP, (1 << rows.bit_length()) // 8)
        return min(self.rows, -(-rows // step) * step)

    def widths(self) -> list[int]:
        widths = [self.width(1)]
        while widths[-1] < self.rows:
            widths.append(self.width(widths[-1] + 1))
        return widths

    def _reach(self, rows: int) -> None:
        self._arena.reach(self.cache, -(-rows // _WIDTH_STEP) * _WIDTH_STEP if self.shared else rows)
        self._free = np.pad(self._free, (0, self.cache.capacity - self.rows), constant_values=True)


class Placed(NamedTuple):
    """The rows of a pass: text, then tree nodes.

    visible  bool [n, m]: which of the cache's first m slots each sees
    rows     int64 [n]: the slots that they take
    """

    visible: NDArray[np.bool_]
    rows: NDArray[np.int64]


class TreeCache:
    """One session's slots of a memory, which is its own by default."""

    def __init__(self, shape: CacheShape, memory: CacheMemory | None = None) -> None:
        self.shape = shape
        self._text = np.zeros(0, np.int64)  # slots, in the text's order
        self._spare: list[int] = []  # slots of nodes that were dropped
        self._parent: dict[int, int] = {}
        self._slot: dict[int, int] = {}
        self.memory = memory or CacheMemory(shape, FIRST_CAPACITY, shared=False)

    def __del__(self) -> None:
        if hasattr(self, "memory"):  # it is not if there was no memory for it
            self.reset()

    def __contains__(self, node: int) -> bool:
        return node in self._slot

    @property
    def committed(self) -> int:
        """Rows of text."""
        return len(self._text)

    def reset(self) -> None:
        """Forget text and tree; keep a memory of its own."""
        self._keep(0)

    def rewind(self, rows: int) -> None:
        """Drop the tree and the text from row ``rows`` on; shrink a memory of its own that is far too large."""
        self._keep(rows)
        if not self.memory.shared:
            self.memory.shrink()

    def _keep(self, rows: int) -> None:
        dropped = [*self._slot.values(), *self._spare]
        self.memory.give_back(np.concatenate((self._text[rows:], np.array(dropped, np.int64))))
        self._text = self._text[:rows]
        self._parent.clear()
        self._slot.clear()
        self._spare.clear()

    def reroot(self, root: int) -> None:
        """Drop ``root``, which is text now, and every node that is not below it."""
        below = {root}
        for node in sorted(self._parent):  # a parent's id is smaller than its child's
            if self._parent[node] in below:
                below.add(node)
        below.discard(root)
        self._spare += [slot for node, slot in self._slot.items() if node not in below]
        self._parent = {node: parent for node, parent in self._parent.items() if node in below}
        self._slot = {node: slot for node, slot in self._slot.items() if node in below}

    def begin(self, new_text: int, nodes: Sequence[tuple[int, int]]) -> Placed:
        """Make room for one forward pass.

        new_text  text rows that the pass appends, before its tree rows
        nodes     (id, parent) of the tree rows; a parent is in the cache, or the root (the last text row)
        """
        self.memory.clear_returned()
        fresh = [node for node, _ in nodes if node not in self._slot]
        slots = self._take(new_text + len(fresh))
        self._text = np.concatenate((self._text, np.array(slots[:new_text], np.int64)))
        self._slot.update(zip(fresh, slots[new_text:], strict=True))
        self._parent.update(nodes)
        rows = [*slots[:new_text], *(self._slot[node] for node, _ in nodes)]
        return Placed(self._visible(new_text, [self._path(node) for node, _ in nodes]), np.array(rows, np.int64))

    def for_pass(self, placed: Placed) -> KVPass:
        return KVPass(self.memory.cache, indices(placed.rows, self.shape.device), placed.visible.shape[1])

    def mask(self, placed: Placed) -> SharedMask:
        return self.shape.mask(placed.visible)

    def _take(self, count: int) -> list[int]:
        missing = count - len(self._spare)
        slots = self._spare[:count] + (self.memory.take(missing).tolist() if missing > 0 else [])
        self._spare = self._spare[count:]
        return slots

    def _visible(self, new_text: int, paths: Sequence[list[int]]) -> NDArray[np.bool_]:
        """Return what the pass' rows see; ``paths``: of its tree rows."""
        text, window = self._text, self.shape.kind.window
        last = max(text.max(initial=-1), max(self._slot.values(), default=-1))
        mask = np.zeros(self.memory.width(int(last) + 1), bool)
        mask[text] = True
        visible = np.tile(mask, (new_text + len(paths), 1))
        for row, stop in enumerate(range(len(text) - new_text + 1, len(text))):  # the last one sees all of the text
            visible[row, text[stop:]] = False
        for row, path in enumerate(paths, new_text):
            visible[row, path] = True
        if window is not None:
            ends = [*range(len(text) - new_text + 1, len(text) + 1), *(len(text) + len(path) for path in paths)]
            for row, end in enumerate(ends):
                visible[row, text[: max(0, end - window)]] = False
        return visible

    def _path(self, node: int) -> list[int]:
        """Return the slots of a node and of those above it, up to, and not including, the root.

        No more than a window.
        """
        path: list[int] = []
        while node in self._slot and len(path) != self.shape.kind.window:
            path.append(self._slot[node])
            node = self._parent[node]
        return path
