"""The keys and values of layers of one kind: ranges of rows of one arena, a slot a row, ordered by number.

    arena = KVArena(range(0, 4), kv_heads, head_dim, dtype, device, rows=5_000)
    cache = arena.take(capacity)       # a session's
    arena.widen(cache, capacity)       # for a session that begins with another one's rows
    arena.give_back(cache)             # so does deleting the last reference to the cache

A pass writes behind a cache's last row, or to any of its slots (``KVPass``): drafters, whose tree is not the text
that follows, give the slots of one cache to their rows one by one (``drafting.tree_cache``).

Layers with a window hold the committed rows that a later row may see, ``SLACK`` more, so that a text can be
cut that much shorter, and at most ``SLACK`` beyond, so that rows seldom move; and every uncommitted row.
They also go on holding the window before one place in the text, the *snapshot*, which a session may begin at.

An allocation on a board takes long, because the system clears the pages and the device is waited for, and it
fragments the memory that GPU and system share.  So a stage allocates all rows before its first session, and
what its sessions take and give back are ranges.  Where none fits although enough rows are free, ranges move.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.messages import Int32
from flowspec_edge.model.manifest import WINDOW_SLACK, CacheBits, window_text
from flowspec_edge.util.tensors import to_device
from flowspec_edge.util.torchdevice import release

_MOVED = 256  # rows that are in memory twice while ranges move
SLACK = WINDOW_SLACK


class KVArena:
    """Memory for ``rows`` rows of all caches of ``layers``, indexes in the model; grows when they take more.

    window  rows that a row of these layers sees, its own included; None: all
    """

    def __init__(self, layers: Sequence[int], kv_heads: int, head_dim: int, dtype: torch.dtype,
                 device: torch.device, cache_bits: CacheBits = "16bit", rows: int = 0,
                 window: int | None = None) -> None:
        self.index = {layer: i for i, layer in enumerate(layers)}
        self.dtype, self.device, self.window = dtype, device, window
        self.rows = rows
        self.resized = 0  # how often the layers' memory has changed its place
        self._kind = Int8KVCache if cache_bits == "int8" else KVCache
        width, stored = (head_dim + _SCALE, torch.int8) if cache_bits == "int8" else (head_dim, dtype)
        self.row_bytes = len(layers) * row_bytes(kv_heads, head_dim, dtype.itemsize, cache_bits)
        # By layer, [key or value, slot, kv head, head_dim]: the heads of a row are contiguous, as the layers
        # produce them, so that writing, reading and moving rows touches memory in order.
        self.layers = [torch.empty(2, rows, kv_heads, width, dtype=stored, device=device) for _ in layers]
        # Not held: they hold the arena, and a circle would keep its memory until the collector finds it.
        self._live: WeakSet[KVCache] = WeakSet()

    @property
    def _caches(self) -> list[KVCache]:
        """The caches in the order of their ranges."""
        return sorted(self._live, key=lambda cache: (cache.start, cache.capacity))

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def missing(self, capacity: int, existing: KVCache | None = None) -> int:
        """Rows by which the arena must grow for a cache, or ``existing``, to hold ``capacity``."""
        occupied = sum(cache.capacity for cache in self._caches if cache is not existing)
        return max(0, occupied + capacity - self.rows)

    def take(self, capacity: int) -> KVCache:
        """Return an empty cache.

        May move the other caches' rows.
        """
        if self._gap(capacity) is None:
            self._resize(self.rows + self.missing(capacity))
            self._compact()
        start = self._gap(capacity)
        assert start is not None
        cache = self._kind(self, start, capacity)
        self._live.add(cache)
        return cache

    def widen(self, cache: KVCache, capacity: int) -> None:
        """Let ``cache`` hold up to ``capacity`` rows, at least as many as now.  May move all caches' rows."""
        caches = self._caches
        index = caches.index(cache)
        end = caches[index + 1].start if index + 1 < len(caches) else self.rows
        if cache.start + capacity > end:
            self._resize(self.rows + self.missing(capacity, cache))
            self._compact(cache, capacity)
        cache.capacity = capacity

    def reach(self, cache: KVCache, rows: int) -> None:
        """Make room for ``rows`` rows in ``cache``, for a text whose final length is unknown.

        A cache that grows at least doubles its capacity.  New slots hold zeros: a pass also reads the slots that its
        mask hides, and they must be finite.
        """
        before = cache.capacity
        if rows > before:
            self.widen(cache, max(rows, 2 * before))
            for layer in self.layers:
                layer[:, cache.start + before : cache.start + cache.capacity].zero_()

    def trim(self) -> None:
        """Give back the memory behind the last range."""
        self._resize(max((cache.start + cache.capacity for cache in self._live), default=0))

    def give_back(self, cache: KVCache) -> None:
        self._live.remove(cache)

    def _gap(self, capacity: int) -> int | None:
        """Return the first slot of the first free range of ``capacity`` slots."""
        caches = self._caches
        starts = [0, *(cache.start + cache.capacity for cache in caches)]
        stops = [*(cache.start for cache in caches), self.rows]
        return next((start for start, stop in zip(starts, stops, strict=True) if stop - start >= capacity), None)

    @torch.inference_mode(False)  # or only passes in this mode could write to it
    @torch.no_grad()
    def _resize(self, rows: int) -> None:
        """One layer at a time, so that at most one is in memory twice."""
        if rows == self.rows:
            return
        kept_rows, self.resized = min(rows, self.rows), self.resized + 1
        for i in range(len(self.layers)):
            resized = self.layers[i].new_empty(2, rows, *self.layers[i].shape[2:])
            resized[:, :kept_rows] = self.layers[i][:, :kept_rows]
            self.layers[i] = resized
            release(self.device)
        self.rows = rows

    @torch.inference_mode()
    def _compact(self, wider: KVCache | None = None, capacity: int = 0) -> None:
        """Move all ranges together, with ``capacity`` slots for ``wider``."""
        caches = self._caches
        sizes = [capacity if cache is wider else cache.capacity for cache in caches]
        starts = [sum(sizes[:count]) for count in range(len(sizes))]
        moves = [(cache.start, start, cache.occupied) for cache, start in zip(caches, starts, strict=True)]
        # The order of the ranges stays: those that move down, from the lowest on, then those that move up,
        # from the highest on, never overwrite rows that have not moved yet.
        steps = [(source + lo, target + lo, min(_MOVED, rows - lo)) for source, target, rows in moves
                 if target < source for lo in range(0, rows, _MOVED)]
        steps += [(source + lo, target + lo, min(_MOVED, rows - lo)) for source, target, rows in moves[::-1]
                  if target > source for lo in reversed(range(0, rows, _MOVED))]
        self.move(steps)
        for cache, start in zip(caches, starts, strict=True):
            cache.start = start

    def move(self, steps: Sequence[tuple[int, int, int]]) -> None:
        """Move rows in every layer, one step after another: ``rows`` rows from slot ``source`` to ``target``."""
        for layer in self.layers:
            for source, target, rows in steps:
                layer[:, target:target + rows] = layer[:, source:source + rows].clone()


class KVCache:
    """Keys and values of up to ``capacity`` rows; a ``LayerCache``.

    A pass writes its rows behind the last slot with ``write``; ``append`` makes them part of the cache,
    otherwise the next pass overwrites them.
    """

    def __init__(self, arena: KVArena, start: int, capacity: int) -> None:
        """Set up an empty cache; ``start``: first slot in the arena, which changes it."""
        self.start = start
        self.capacity = capacity
        self.first = 0
        self._arena = arena
        self._snapshot = 0  # rows of text, the last of which a window keeps
        self._apart = 0  # of these, rows that it keeps in the first slots, because others behind them went
        self._length = 0
        self._reserved = 0  # rows of the pass that may be under way

    def __len__(self) -> int:
        return self._length

    @property
    def occupied(self) -> int:
        """Slots that hold rows, or may hold those of a pass."""
        return min(self.capacity, self._apart + self._length + self._reserved)

    @property
    def _begin(self) -> int:
        """The first row's slot in the arena."""
        return self.start + self._apart

    def rows(self) -> dict[int, Tensor]:
        """Keys and values by layer: views [2, len, kv_heads, head_dim]."""
        return {layer: self._arena.layers[i][:, self._begin : self._begin + self._length]
                for layer, i in self._arena.index.items()}

    def reserve(self, rows: int) -> None:
        """Before a pass of ``rows`` rows.  FlowspecError unless they fit."""
        if self._apart + self._length + rows > self.capacity:
            raise FlowspecError(f"KV cache is full: {self._length} rows held, {rows} more to come, "
                                f"capacity {self.capacity}: shorten the request or raise the capacity")
        self._reserved = rows

    def write(self, rows: Tensor, layer_idx: int) -> Tensor:
        """Write one layer's new keys and values [n, 2, kv_heads, head_dim] behind the last slot.

        Returns all keys, then all values of the layer, new rows included: [2, len + n, kv_heads, head_dim].
        """
        slots = self._slots(layer_idx, self._length + len(rows))
        slots[:, self._length :].copy_(self._encode(rows).transpose(0, 1))
        return self._decode(slots)

    def write_to(self, slots: Tensor, rows: Tensor, layer_idx: int, width: int) -> Tensor:
        """Write them to ``slots``, int64 [n]; returns the layer's first ``width`` slots, as :meth:`write` does."""
        self._slots(layer_idx, self.capacity).index_copy_(1, slots, self._encode(rows).transpose(0, 1))
        return self.read(layer_idx, width)

    def read(self, layer_idx: int, width: int) -> Tensor:
        """Return the layer's first ``width`` slots: [2, width, kv_heads, head_dim] in the layers' dtype."""
        return self._decode(self._slots(layer_idx, width))

    def _slots(self, layer_idx: int, count: int) -> Tensor:
        return self._arena.layers[self._arena.index[layer_idx]].narrow(1, self._begin, count)

    def _encode(self, rows: Tensor) -> Tensor:
        return rows

    def _decode(self, slots: Tensor) -> Tensor:
        return slots

    def append(self, rows: int) -> None:
        """Add the rows that every layer has just written."""
        self._length, self._reserved = self._length + rows, 0

    @torch.inference_mode()
    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the slots where ``mask`` [len] is False, and compact the rest."""
        if mask.all():
            return
        first = int(mask.argmin())
        source = first + np.flatnonzero(mask[first:])
        length = first + len(source)
        if len(source):
            slots = to_device(torch.from_numpy(self._begin + source), self._arena.device)
            for layer in self._arena.layers:
                layer[:, self._begin + first : self._begin + length] = layer.index_select(1, slots)
        self._length = length

    @torch.inference_mode()
    def commit(self, rows: int) -> None:
        """Make the session's first ``rows`` rows text: a window drops those that no later row sees."""
        window = self._arena.window
        if window is None or rows - self.first <= window - 1 + 2 * SLACK:
            return
        first, oldest = rows - (window - 1 + SLACK), max(0, self._snapshot - (window - 1))
        if self._apart or not self._snapshot:
            self._drop(first)
        elif first < self._snapshot:
            self._drop(min(first, oldest))
        else:
            self._drop(oldest)
            self._apart = self._snapshot - oldest
            self.first += self._apart
            self._length -= self._apart
            self._drop(first)

    def _drop(self, first: int) -> None:
        """Drop the rows before ``first``, if the cache holds any."""
        dropped = first - self.first
        if dropped <= 0:
            return
        self._shift(self._begin + dropped, self._begin, self._length - dropped)
        self.first = first
        self._length -= dropped

    def _shift(self, source: int, target: int, rows: int) -> None:
        """Move rows to lower slots, in all layers."""
        self._arena.move([(source + lo, target + lo, min(_MOVED, rows - lo))
                          for lo in range(0, rows, _MOVED)])

    def retain(self, rows: int) -> None:
        """All rows are text, ``rows`` of them, and no more are to come."""
        if rows < self.first and not self._apart:
            raise ProtocolError(f"a text cannot be cut behind {rows} rows: layers with a window hold those "
                                f"from row {self.first} on")
        self.commit(rows)
        self._reserved = 0
        self.capacity = self._apart + self._length

    @torch.inference_mode()
    def truncate(self, rows: int) -> None:
        """Keep the first ``rows`` rows; ProtocolError if a window has dropped rows that the next one sees."""
        if self._apart and rows == self._snapshot:
            self.first, self._length = rows - self._apart, self._apart
        else:
            self._check(rows)
            self._length = rows - self.first
            self._shift(self._begin, self.start, self._length if self._apart else 0)
        self._apart = self._snapshot = 0

    def snapshot_at(self, rows: int) -> None:
        """Note a snapshot after ``rows`` rows, to which ``truncate`` can return; ProtocolError as there."""
        if self._arena.window is not None:
            self._check(rows)
            self._snapshot = rows

    def _check(self, rows: int) -> None:
        if self.first and rows < self.first + (self._arena.window or 1) - 1:
            raise ProtocolError(f"a session cannot begin with {rows} rows of a text of which layers with a "
                                f"window hold the rows from {self.first} on")

    @torch.inference_mode()
    def fill(self, rows: int) -> None:
        self._length = rows
        if self._arena.window is not None:
            self._length = min(rows, self._arena.window - 1 + SLACK)
        self.first = rows - self._length
        for layer in self.rows().values():
            layer.zero_()

    def visible(self, mask: NDArray[np.bool_], positions: Int32, columns: Int32) -> NDArray[np.bool_]:
        window = self._arena.window
        if window is None:
            return mask
        near: NDArray[np.bool_] = positions[:, None] - columns[None, self.first :] < window
        return mask[:, self.first :] & near


def window_rows(window: int, tentative: int) -> int:
    """Rows that a session's cache holds at most, ``tentative`` of them uncommitted or in one segment."""
    return window_text(window) + tentative


def window_reusable(window: int, text: int, limit: int, snapshot: int) -> int:
    """Return the most rows, up to ``limit``, to which a cache can surely be cut; 0: none.

    The cache has up to ``text`` rows of a text.
    """
    if text <= window - 1 + 2 * SLACK or text - limit <= SLACK:
        return limit
    return snapshot if snapshot <= limit else 0


class Int8KVCache(KVCache):
    """Keeps a byte a value, and a scale for each head of a row, in ``_SCALE`` bytes behind its values.

    A pass reads all rows of a layer in the layers' dtype, its own rows as they are kept: what a row sees does
    not depend on when it is computed.
    """

    def _encode(self, rows: Tensor) -> Tensor:
        return in_int8(rows)

    def _decode(self, slots: Tensor) -> Tensor:
        return from_int8(slots, self._arena.dtype)


class KVPass:
    """A cache in a pass whose rows take ``slots`` of it, int64 [n], and see its first ``width`` slots."""

    def __init__(self, cache: KVCache, slots: Tensor, width: int) -> None:
        self._cache, self._slots, self._width = cache, slots, width

    def write(self, rows: Tensor, layer_idx: int) -> Tensor:
        """Write rows as :meth:`KVCache.write`."""
        return self._cache.write_to(self._slots, rows, layer_idx, self._width)


_SCALE = 2  # bytes of a bfloat16


def in_int8(values: Tensor) -> Tensor:
    """[..., d] to int8 [..., d + _SCALE]: codes of at most 127, then their bfloat16 scale."""
    wide = values.float()
    # Rounded up to bfloat16: a smaller scale would clip the largest value.
    scales = (wide.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-8)).to(torch.bfloat16)
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    codes = (wide * inverse).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def from_int8(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values that ``in_int8`` kept: [..., d] in ``dtype``."""
    scales = stored[..., -_SCALE:].contiguous().view(torch.bfloat16)
    return stored[..., :-_SCALE].to(dtype) * scales.to(dtype)


def row_bytes(kv_heads: int, head_dim: int, width: int, cache_bits: CacheBits) -> int:
    """Return the bytes of one row's keys and values in one layer; ``width``: of a value in the compute dtype."""
    return 2 * kv_heads * (head_dim + _SCALE if cache_bits == "int8" else head_dim * width)
