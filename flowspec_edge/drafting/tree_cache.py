"""Keys and values of a drafter: text in slots [0, committed), tree nodes unordered in [committed, used).

A layer's keys and values are one tensor, so that a pass's rows are stored by one kernel.

When the text grows, only nodes whose slots it takes are moved.

Several sessions' caches side by side are one for a pass over rows of all of them. Any of transformers'
models takes it: a mask keeps each row to its own session's columns. Attention does more work than it has
to, which is little beside the weights of all layers, read once instead of once a session. EAGLE heads,
whose attention is known, go session by session (``eagle.head_drafter``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.util.tensors import indices, to_device

_FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class CacheShape:
    """``layers`` times keys and values, [1, kv_heads, capacity, head_dim] each.

    ``window``: a row attends only to that many nearest rows, itself included, so that no distance exceeds
    those of training; None: to all.
    """

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
        self._layers: list[Tensor] = []  # [1, 2 * kv_heads, capacity, head_dim]: keys, then values
        self._parent: dict[int, int] = {}
        self._slot: dict[int, int] = {}
        self._used = 0
        self._write: Tensor | None = None
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
            self._layers = [held[:, :, :wanted].clone() for held in self._layers]

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
        return additive_mask(self._mask(start, nodes), self._shape.dtype, self.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
               ) -> tuple[Tensor, Tensor]:
        """Store a pass's rows [1, kv_heads, rows, head_dim]; return everything in use."""
        assert self._write is not None, "begin() comes first"
        held = self._in_use(layer)
        for target, new in zip(held, (keys, values), strict=True):
            target.index_copy_(2, self._write, new)
        return held

    def write(self, rows: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """As :meth:`update`, for keys, then values, of all heads: [rows, 2 * kv_heads, head_dim]."""
        assert self._write is not None, "begin() comes first"
        self._layers[layer][0].index_copy_(1, self._write, rows.transpose(0, 1))
        return self._in_use(layer)

    def joined(self, layer: int) -> Tensor:
        """Everything in use: [1, 2 * kv_heads, slots, head_dim]."""
        return self._layers[layer][:, :, : self._used]

    def _in_use(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.joined(layer).chunk(2, dim=1)
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        """Part of transformers' cache protocol."""
        return self._used

    def _mask(self, start: int, nodes: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        text = self.committed - start
        mask = np.zeros((text + len(nodes), self._used), dtype=bool)
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
        for held in self._layers:
            held.index_copy_(2, target, held.index_select(2, source))
        self._slot.update(zip(displaced, free, strict=True))

    def _grow(self, needed: int) -> None:
        if needed <= self._capacity:
            return
        self._capacity = max(needed, 2 * self._capacity)
        s = self._shape
        shape = (1, 2 * s.kv_heads, self._capacity, s.head_dim)
        grown = [torch.zeros(shape, dtype=s.dtype, device=s.device) for _ in range(s.layers)]
        for new, old in zip(grown, self._layers, strict=False):  # at first there is nothing old
            new[:, :, : old.shape[2]] = old
        self._layers = grown


def additive_mask(visible: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, n, m]: 0 where ``visible`` [n, m], -inf elsewhere.

    Attention kernels take it without a conversion or a copy in each layer: it has their dtype, and its rows
    begin at multiples of 16 bytes.
    """
    n, m = visible.shape
    seen = np.zeros((n, -(-m // 8) * 8), dtype=bool)
    seen[:, :m] = visible
    mask = torch.where(to_device(torch.from_numpy(seen), device), *_levels(dtype, device))
    return mask[None, None, :, :m]


@lru_cache
def _levels(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    seen, unseen = (torch.full((), value, dtype=dtype, device=device) for value in (0.0, -torch.inf))
    return seen, unseen


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

    def write(self, rows: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        for cache, own in zip(self._caches, rows.split(self._rows), strict=True):
            cache.write(own, layer)
        keys, values = torch.cat([cache.joined(layer) for cache in self._caches], 2).chunk(2, dim=1)
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return sum(cache.get_seq_length(layer) for cache in self._caches)
