"""Keys and values of a drafter: text in slots [0, committed), tree nodes unordered in [committed, used).

When the text grows, only nodes whose slots it takes are moved.

Several sessions' caches side by side are one for a pass over rows of all of them. Any of transformers'
models takes it: a mask keeps each row to its own session's columns. Attention does more work than it has
to, which is little beside the weights of all layers, read once instead of once a session. EAGLE heads,
whose attention is known, go session by session (``eagle.head_drafter``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.util.tensors import indices, to_device

_FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class CacheShape:
    """``layers`` pairs of [1, kv_heads, capacity, head_dim].  ``window``: a row attends only to that many
    nearest rows, itself included, so that no distance exceeds those of training; None: to all."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None


class TreeCache:
    """One session's cache, as transformers' attention classes call it."""

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
        return self._shape.device

    def reset(self) -> None:
        """Forget text and tree; keep the memory."""
        self.committed = self._used = 0
        self._parent.clear()
        self._slot.clear()

    def rewind(self, rows: int) -> None:
        """Drop the tree and the text from row ``rows`` on; shrink buffers that are far too large."""
        self.committed = self._used = rows
        self._parent.clear()
        self._slot.clear()
        wanted = max(rows, _FIRST_CAPACITY)
        if self._capacity > 2 * wanted:
            self._capacity = wanted
            for buffers in (self._keys, self._values):
                buffers[:] = [buffer[:, :, :wanted].clone() for buffer in buffers]

    def reroot(self, root: int) -> None:
        """Drop ``root``, which is text now, and every node that is not below it."""
        kept = {root}
        for node in sorted(self._parent):  # a parent's id is smaller than its child's
            if self._parent[node] in kept:
                kept.add(node)
        kept.discard(root)
        self._parent = {node: self._parent[node] for node in self._parent if node in kept}
        self._slot = {node: self._slot[node] for node in self._slot if node in kept}

    def begin(self, new_text: int, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """Make room for one forward pass; returns its attention mask.

        new_text  text rows that the pass appends, before its tree rows
        nodes     (id, parent) of the tree rows; a parent is in the cache, or the root (the last text row)
        returns   [1, 1, new_text + len(nodes), slots in use], additive: 0 or -inf
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
        """Store a pass's rows [1, kv_heads, rows, head_dim]; return everything in use."""
        assert self._write is not None, "begin() comes first"
        self._keys[layer].index_copy_(2, self._write, keys)
        self._values[layer].index_copy_(2, self._write, values)
        return self._keys[layer][:, :, : self._used], self._values[layer][:, :, : self._used]

    def get_seq_length(self, layer: int = 0) -> int:
        """Part of transformers' cache protocol."""
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
        """Move the tree's ``count`` rows into slots [first, first + count)."""
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


class JointCache:
    """Has the methods that transformers calls; see ``TreeCache``."""

    def __init__(self, caches: Sequence[TreeCache], rows: Sequence[int]) -> None:
        """``rows``: of each session in the pass, for which its cache has made room (``TreeCache.begin``)."""
        self._caches, self._rows = caches, list(rows)

    def mask(self, masks: Sequence[Tensor]) -> Tensor:
        """Additive, [1, 1, n, m], of the sessions' masks: a row sees nothing of the other sessions."""
        width = sum(mask.shape[-1] for mask in masks)
        # Fused attention kernels want rows that begin at multiples of 16 bytes.
        whole = masks[0].new_full((1, 1, sum(self._rows), -(-width // 8) * 8), float("-inf"))
        row = column = 0
        for mask in masks:
            below, right = row + mask.shape[-2], column + mask.shape[-1]
            whole[:, :, row:below, column:right] = mask
            row, column = below, right
        return whole[..., :width]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
               ) -> tuple[Tensor, Tensor]:
        pairs = [cache.update(key, value, layer) for cache, key, value in
                 zip(self._caches, keys.split(self._rows, 2), values.split(self._rows, 2), strict=True)]
        return torch.cat([key for key, _ in pairs], 2), torch.cat([value for _, value in pairs], 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return sum(cache.get_seq_length(layer) for cache in self._caches)
