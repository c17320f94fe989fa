"""Keys and values of a drafter: the committed text first, the rows of tree nodes behind it.

Knows slots, node identities, who descends from whom and what a row may see.  Does not know what a
row is made of: the EAGLE head and a plain language model share this cache.

Layout of every buffer: slots [0, committed) hold the text, slots [committed, used) hold tree
nodes in no particular order.  When the text grows, only the nodes whose slots it takes move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.tensors import indices, to_device

_FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one cache must hold: ``layers`` pairs of [1, kv_heads, capacity, head_dim].

    ``window``: how many rows a row may see, itself included, the nearest ones; None: all.  Rotary
    positions are relative, so a model never meets a distance that it was not trained for.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None


class TreeCache:
    """One session's cache; :meth:`update` is what transformers' attention classes call."""

    def __init__(self, shape: CacheShape) -> None:
        self.committed = 0
        self._shape = shape
        self._capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._parent: dict[int, int] = {}
        self._slot: dict[int, int] = {}
        self._used = 0
        self._write: Tensor | None = None
        self._seen = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self._unseen = torch.full((), -torch.inf, dtype=shape.dtype, device=shape.device)
        self._grow(_FIRST_CAPACITY)

    def __contains__(self, node: int) -> bool:
        return node in self._slot

    @property
    def device(self) -> torch.device:
        """Where keys and values lie."""
        return self._shape.device

    def reset(self) -> None:
        """Forget text and tree; the memory stays."""
        self.committed = self._used = 0
        self._parent.clear()
        self._slot.clear()

    def rewind(self, rows: int) -> None:
        """Forget the tree, and the text from row ``rows`` on; memory for far more rows is given back."""
        self.committed = self._used = rows
        self._parent.clear()
        self._slot.clear()
        wanted = max(rows, _FIRST_CAPACITY)
        if self._capacity > 2 * wanted:
            self._capacity = wanted
            for buffers in (self._keys, self._values):
                buffers[:] = [buffer[:, :, :wanted].clone() for buffer in buffers]

    def reroot(self, root: int) -> None:
        """Drop every node that is not below ``root``, and ``root`` itself: it is text now."""
        kept = {root}
        for node in sorted(self._parent):  # a parent's id is smaller than its child's
            if self._parent[node] in kept:
                kept.add(node)
        kept.discard(root)
        self._parent = {node: self._parent[node] for node in self._parent if node in kept}
        self._slot = {node: self._slot[node] for node in self._slot if node in kept}

    def begin(self, new_text: int, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """Make room for one forward pass and say what its rows may see.

        new_text  rows of the text that the pass appends; they come first in the pass
        nodes     (id, parent) of the tree rows that follow; a parent is in the cache, or the root,
                  whose row is the last of the text
        returns   [1, 1, new_text + len(nodes), slots in use], additive: 0 where a row attends, else -inf
        """
        start, end = self.committed, self.committed + new_text
        survivors = len(self._slot)
        self._grow(end + survivors + len(nodes))
        self._compact(end, survivors)
        self.committed = end
        self._used = end + survivors
        for node, parent in nodes:
            if node not in self._slot:
                self._slot[node] = self._used
                self._used += 1
            self._parent[node] = parent
        write = [*range(start, end), *(self._slot[node] for node, _ in nodes)]
        self._write = indices(write, self.device)
        seen = to_device(torch.from_numpy(self._mask(start, nodes)), self.device)
        # Fused attention kernels want rows that begin at multiples of 16 bytes.
        return torch.where(seen, self._seen, self._unseen)[None, None, :, : self._used]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
               ) -> tuple[Tensor, Tensor]:
        """Write a pass's rows [1, kv_heads, rows, head_dim]; return everything in use."""
        assert self._write is not None, "begin() comes first"
        self._keys[layer].index_copy_(2, self._write, keys)
        self._values[layer].index_copy_(2, self._write, values)
        return self._keys[layer][:, :, : self._used], self._values[layer][:, :, : self._used]

    def get_seq_length(self, layer: int = 0) -> int:
        """Part of transformers' cache protocol: rows held."""
        return self._used

    def _mask(self, start: int, nodes: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        text = self.committed - start
        mask = np.zeros((text + len(nodes), -(-self._used // 8) * 8), dtype=bool)
        mask[:, :start] = True
        mask[:text, start : self.committed] = np.tri(text, dtype=bool)
        mask[text:, start : self.committed] = True
        window = self._shape.window or self._used
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
        """Bring the tree's ``count`` rows into slots [first, first + count)."""
        wanted = range(first, first + count)
        displaced = [node for node, slot in self._slot.items() if slot not in wanted]
        if not displaced:
            return
        taken = set(self._slot.values())
        free = [slot for slot in wanted if slot not in taken]
        source = indices([self._slot[node] for node in displaced], self.device)
        target = indices(free, self.device)
        for buffer in (*self._keys, *self._values):
            buffer.index_copy_(2, target, buffer.index_select(2, source))
        self._slot.update(zip(displaced, free, strict=True))

    def _grow(self, needed: int) -> None:
        if needed <= self._capacity:
            return
        self._capacity = max(needed, 2 * self._capacity)
        s = self._shape
        grown: list[Tensor] = []
        for i in range(2 * s.layers):
            buffer = torch.zeros(1, s.kv_heads, self._capacity, s.head_dim, dtype=s.dtype, device=s.device)
            if self._keys:
                old = (self._keys + self._values)[i]
                buffer[:, :, : old.shape[2]] = old
            grown.append(buffer)
        self._keys, self._values = grown[: s.layers], grown[s.layers :]
