"""What a session keeps of recurrent layers: states of the committed text, and an entry a row behind it.

The session's first ``first`` rows are folded into the states, and only the others have entries
(:mod:`delta_rule`): memory does not grow with the text.  Rows are folded by whole blocks of the text, once all rows
of a block are committed, so that no result depends on when that is.

A session that takes over another text begins at a snapshot: what the layers are after each ``GRID`` rows of it,
of which the newest few are kept, or after the rows for which its session asked for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.messages import Int32
from flowspec_edge.model.manifest import SESSIONS
from flowspec_edge.stage.layers.delta_rule import FOLDED, make_plan
from flowspec_edge.stage.layers.recurrent_layer import (
    DeltaPass,
    DeltaShape,
    LayerSnapshot,
    RecurrentLayer,
    last_ancestors,
)
from flowspec_edge.stage.layers.stage_cache import Part
from flowspec_edge.util.tensors import indices

BLOCK = 16  # rows of the text that are folded together
GRID = 256  # rows between snapshots, a multiple of BLOCK
REUSABLE = 2  # snapshots of a text, the newest, that a session may begin with
_USUAL = 8  # blocks of a pass
_EXPECTED = 256  # uncommitted rows: of what a session may have, the part that trees in flight fill
_MAX_SNAPSHOTS = REUSABLE + 1  # one more than that, because a stage is ahead of the text that has come back to D0

Bool = NDArray[np.bool_]


@dataclass(frozen=True)
class GatedDelta(DeltaShape):
    """Layers with the gated delta rule; a ``CacheKind``."""

    window = None  # every row sees the whole text

    @property
    def takes_memory_each(self) -> bool:
        return True

    def reserved(self, rows: int, requests: int, tentative: int) -> int:
        """0: nothing is allocated before a session needs it."""
        return 0

    def session_bytes(self, tentative: int, width: int) -> int:
        """Return the bytes that a session takes in a layer, its snapshots included.

        It can take more if very late prunes leave more entries.
        """
        entries = min(tentative, _EXPECTED) + 3 * BLOCK  # two blocks of text, and a snapshot's rest
        return (3 + _MAX_SNAPSHOTS) * self.state_bytes(width) + entries * self.entry_bytes(width)

    def request_bytes(self, width: int) -> int:
        """Return the bytes in a layer for each request at once.

        They are its session, and the snapshots of texts that were retained, one of them near the prompt's end.
        """
        retained = (REUSABLE + 1) * self.state_bytes(width) + BLOCK * self.entry_bytes(width)
        return self.session_bytes(_EXPECTED, width) + (SESSIONS - 1) * retained

    def read_bytes(self) -> int:
        """Return the bytes that a pass of a layer reads.

        They are two states, since rows lie on both sides of a block's end, and the blocks' keys, which are gathered.
        """
        keys = 2 * BLOCK * 4 * self.key_heads * self.key_width
        return 2 * self.state_bytes(0) + _USUAL * (self.entry_bytes(0) + keys)

    def rows(self, capacity: int, tentative: int) -> int:
        """Entries of a session of ``capacity`` rows, ``tentative`` of them uncommitted."""
        return min(capacity, tentative) + 2 * BLOCK

    def reusable(self, text: int, limit: int, snapshot: int) -> int:
        rows = limit // GRID * GRID
        return max(rows if rows // GRID > text // GRID - REUSABLE else 0,
                   snapshot if snapshot <= limit else 0)

    def arena(self, layers: Sequence[int], dtype: torch.dtype, device: torch.device, rows: int
              ) -> RecurrentArena:
        return RecurrentArena(self, layers, dtype, device)

    def row_bytes(self, width: int) -> int:
        """0: a row of the text takes no memory."""
        return 0

    def inputs(self, parts: Sequence[Part], index: int, dtype: torch.dtype, device: torch.device, step: int
               ) -> tuple[RecurrentPass, None]:
        for part in parts:
            _recurrent_cache(part, index).begin(part.mask)
        return RecurrentPass(parts, index), None


class RecurrentPass:
    """The parts' caches, as a pass's layers take them."""

    def __init__(self, parts: Sequence[Part], kind: int) -> None:
        self._parts, self._kind = parts, kind

    def recurrent(self, layer_idx: int) -> Iterator[tuple[slice, RecurrentLayer | None]]:
        """Yield the rows of each part and what it keeps of the layer; None for those that have ended."""
        start = 0
        for part in self._parts:
            layer = None if part.ended else _recurrent_cache(part, self._kind).layers[layer_idx]
            yield slice(start, start + len(part)), layer
            start += len(part)


def _recurrent_cache(part: Part, kind: int) -> RecurrentCache:
    cache = part.cache.parts[kind]
    assert isinstance(cache, RecurrentCache)
    return cache


class RecurrentArena:
    """Allocates what each session takes: states, and room for entries as they are needed."""

    def __init__(self, kind: GatedDelta, layers: Sequence[int], dtype: torch.dtype, device: torch.device
                 ) -> None:
        self.rows = 0
        self.row_bytes = len(layers) * kind.entry_bytes(dtype.itemsize)
        self._kind, self._layers, self._dtype, self._device = kind, layers, dtype, device
        self._caches: list[RecurrentCache] = []

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches)

    def missing(self, capacity: int, existing: RecurrentCache | None = None) -> int:
        """Return what is missing, in entries' bytes, also for the states of a new session."""
        if existing is not None:
            return 0
        width = self._dtype.itemsize
        return -(-self._kind.session_bytes(capacity, width) // self._kind.entry_bytes(width))

    def take(self, capacity: int) -> RecurrentCache:
        cache = RecurrentCache(self._kind, self._layers, capacity, self._dtype, self._device)
        self._caches.append(cache)
        return cache

    def widen(self, cache: RecurrentCache, capacity: int) -> None:
        cache.capacity = capacity

    def give_back(self, cache: RecurrentCache) -> None:
        self._caches.remove(cache)


class RecurrentCache:
    """A session's layers, by index in the model; a ``LayerCache``."""

    def __init__(self, kind: GatedDelta, layers: Sequence[int], capacity: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.first = 0
        self.capacity = capacity
        self._device, self._kernel, self._heads = device, kind.kernel, (kind.key_heads, kind.heads)
        self._length = 0
        self.layers = {layer: RecurrentLayer(kind, dtype, device) for layer in layers}
        self._ahead = self._next_ahead = FOLDED  # the entry behind which the layers keep a state; after this pass
        self._snapshots: dict[int, list[LayerSnapshot]] = {}  # of all layers, by rows of text, the oldest first
        self._snapshot = 0  # rows of text after which one is kept beside those of the grid

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        snapshot_bytes = sum(snapshot.nbytes for layers in self._snapshots.values() for snapshot in layers)
        return snapshot_bytes + sum(layer.nbytes for layer in self.layers.values())

    def reserve(self, rows: int) -> None:
        """Nothing: ``begin`` makes room."""

    def begin(self, mask: Bool) -> None:
        """Before a pass.  FlowspecError unless its rows fit.

        mask  [n, first + len + n] bool: what its rows see
        """
        visible = mask[:, self.first:]
        if self._length + len(visible) > self.capacity:
            raise FlowspecError(f"recurrent layers hold {self._length} rows that are not folded, {len(visible)} "
                                f"more to come, capacity {self.capacity}: open the session with more "
                                "tentative rows")
        for layer in self.layers.values():
            layer.make_room(self._length + len(visible))
        plan = make_plan(visible, self._heads, BLOCK, self._ahead, self._device)
        current = DeltaPass(plan, self._ahead, indices(last_ancestors(visible, self._kernel), self._device))
        # A pass that fails leaves layers that keep different states.
        self._ahead, self._next_ahead = FOLDED, plan.ahead
        for layer in self.layers.values():
            layer.begin(current)

    def append(self, rows: int) -> None:
        for layer in self.layers.values():
            layer.append(rows)
        self._length += rows
        self._ahead = self._next_ahead

    @torch.inference_mode()
    def commit(self, rows: int) -> None:
        stops = set(range((self.first // GRID + 1) * GRID, rows + 1, GRID))
        if max(self.first, 1) <= self._snapshot <= rows and self._snapshot not in self._snapshots:
            stops.add(self._snapshot)
        for stop in sorted(stops):
            self._fold(stop)
            self._snapshots[stop] = [layer.snapshot(stop - self.first) for layer in self.layers.values()]
            for oldest in [at for at in self._snapshots if at != self._snapshot][:-_MAX_SNAPSHOTS]:
                del self._snapshots[oldest]
        self._fold(rows)

    def _fold(self, rows: int) -> None:
        """Fold the blocks of the first ``rows`` rows."""
        while (remaining := rows // BLOCK * BLOCK - self.first) > 0:
            if FOLDED < self._ahead < remaining:
                count = self._ahead + 1
                for layer in self.layers.values():
                    layer.advance(count)
            else:
                count = BLOCK
                for layer in self.layers.values():
                    layer.fold(count)
            self.first += count
            self._length -= count
            self._ahead = max(FOLDED, self._ahead - count)

    def snapshot_at(self, rows: int) -> None:
        self._snapshot = rows

    @torch.inference_mode()
    def keep(self, mask: Bool) -> None:
        slots = np.flatnonzero(mask)
        if len(slots) < self._length:
            first = int(mask.argmin())  # those before it stay in place
            moved = indices(slots[first:], self._device)
            for layer in self.layers.values():
                layer.keep(first, moved)
            self._length = len(slots)
            if self._ahead != FOLDED:
                self._ahead = int(mask[: self._ahead].sum()) if mask[self._ahead] else FOLDED

    @torch.inference_mode()
    def retain(self, rows: int) -> None:
        """Keep no more than the snapshots that a session may begin with: a stage may have folded more."""
        self.commit(rows)
        committed = [at for at in self._snapshots if at <= rows]
        newest = [at for at in committed if at % GRID == 0][-REUSABLE:]
        self._snapshots = {at: self._snapshots[at] for at in committed if at in newest or at == self._snapshot}
        self.first, self._length, self.capacity, self._ahead = rows, 0, 0, FOLDED
        for layer in self.layers.values():
            layer.clear()

    @torch.inference_mode()
    def truncate(self, rows: int) -> None:
        if rows not in self._snapshots:
            raise ProtocolError(f"a session cannot begin with {rows} rows of a text whose recurrent layers "
                                f"kept the states after {list(self._snapshots) or 'none'}")
        self._snapshots = {at: states for at, states in self._snapshots.items() if at <= rows}
        for layer, snapshot in zip(self.layers.values(), self._snapshots[rows], strict=True):
            layer.restore(snapshot)
        self.first, self._length = rows // BLOCK * BLOCK, rows % BLOCK
        self._snapshot, self._ahead = 0, FOLDED

    def fill(self, rows: int) -> None:
        self.first, self._length = rows // BLOCK * BLOCK, rows % BLOCK
        for layer in self.layers.values():
            layer.fill(self._length)

    def visible(self, mask: Bool, positions: Int32, columns: Int32) -> Bool:
        return mask[:, self.first:]

    def rows(self) -> dict[int, Tensor]:
        """Return the states."""
        return {index: layer.state for index, layer in self.layers.items()}
