"""What a session keeps of recurrent layers: states of the committed text, and an entry a row behind it.

The session's first ``first`` rows are folded into the states, and only the others have entries
(:mod:`delta_rule`): memory does not grow with the text.  Committed rows stay entries until a few are there to
fold at once, since reading and writing a state costs as much as many entries do.

A session that takes over another text begins at a snapshot: the states after each ``GRID`` rows of it,
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
from flowspec_edge.stage.layers.delta_rule import Sight, sight
from flowspec_edge.stage.layers.recurrent_layer import (
    DeltaPass,
    DeltaShape,
    RecurrentLayer,
    State,
    last_ancestors,
)
from flowspec_edge.stage.layers.stage_cache import Part
from flowspec_edge.util.tensors import indices, to_device

AT_ONCE = 16  # committed rows that are folded together
GRID = 256  # rows between snapshots
REUSABLE = 2  # snapshots of a text, the newest, that a session may begin with
_USUAL = 64  # uncommitted rows: four segments of 16
_EXPECTED = 256  # uncommitted rows: of what a session may have, the part that trees in flight fill
_KEPT = REUSABLE + 1  # one more than that, because a stage is ahead of the text that has come back to D0

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
        """That a session takes in a layer, its snapshots included, unless very late prunes leave more
        entries."""
        entries = min(tentative, _EXPECTED) + 2 * AT_ONCE
        return (2 + _KEPT) * self.state_bytes(width) + entries * self.entry_bytes(width)

    def request_bytes(self, width: int) -> int:
        """In a layer, for each request at once: its session, and the snapshots of texts that were retained,
        one of them near the prompt's end."""
        retained = (SESSIONS - 1) * (REUSABLE + 1) * self.state_bytes(width)
        return self.session_bytes(_EXPECTED, width) + retained

    def read_bytes(self) -> int:
        """By a pass of a layer: the state, and a usual number of entries."""
        return self.state_bytes(0) + _USUAL * self.entry_bytes(0)

    def rows(self, capacity: int, tentative: int) -> int:
        """Entries of a session of ``capacity`` rows, ``tentative`` of them uncommitted."""
        return min(capacity, tentative) + 2 * AT_ONCE

    def reusable(self, text: int, wanted: int, snapshot: int) -> int:
        rows = wanted // GRID * GRID
        return max(rows if rows // GRID > text // GRID - REUSABLE else 0,
                   snapshot if snapshot <= wanted else 0)

    def arena(self, layers: Sequence[int], dtype: torch.dtype, device: torch.device, rows: int
              ) -> RecurrentArena:
        return RecurrentArena(self, layers, dtype, device)

    def row_bytes(self, width: int) -> int:
        """0: a row of the text takes no memory."""
        return 0

    def inputs(self, parts: Sequence[Part], index: int, dtype: torch.dtype, device: torch.device, step: int
               ) -> tuple[RecurrentPass, None]:
        for part in parts:
            _held(part, index).begin(part.mask)
        return RecurrentPass(parts, index), None


class RecurrentPass:
    """The parts' caches, as a pass's layers take them."""

    def __init__(self, parts: Sequence[Part], kind: int) -> None:
        self._parts, self._kind = parts, kind

    def recurrent(self, layer_idx: int) -> Iterator[tuple[slice, RecurrentLayer | None]]:
        """The rows of each part and what it keeps of the layer; None for those that have ended."""
        start = 0
        for part in self._parts:
            held = None if part.ended else _held(part, self._kind).layers[layer_idx]
            yield slice(start, start + len(part)), held
            start += len(part)


def _held(part: Part, kind: int) -> RecurrentCache:
    held = part.cache.parts[kind]
    assert isinstance(held, RecurrentCache)
    return held


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

    def missing(self, capacity: int, of: RecurrentCache | None = None) -> int:
        """In entries' bytes, also for the states of a new session."""
        if of is not None:
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
        self._device, self._kernel = device, kind.kernel
        self._length = 0
        self.layers = {layer: RecurrentLayer(kind, dtype, device) for layer in layers}
        self._snapshots: dict[int, list[State]] = {}  # of all layers, by rows of text, the oldest first
        self._snapshot = 0  # rows of text after which one is kept beside those of the grid

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        kept = sum(tensor.nbytes for states in self._snapshots.values() for pair in states for tensor in pair)
        return kept + sum(layer.nbytes for layer in self.layers.values())

    def reserve(self, rows: int) -> None:
        """Nothing: ``begin`` makes room."""

    def begin(self, mask: Bool) -> None:
        """Before a pass.  FlowspecError unless its rows fit.

        mask  [n, first + len + n] bool: what its rows see
        """
        seen = mask[:, self.first:]
        if self._length + len(seen) > self.capacity:
            raise FlowspecError(f"recurrent layers hold {self._length} rows that are not folded, {len(seen)} "
                                f"more to come, capacity {self.capacity}: open the session with more "
                                "tentative rows")
        for layer in self.layers.values():
            layer.make_room(self._length + len(seen))
        masks = Sight(*(to_device(mask, self._device) for mask in sight(seen, len(seen))))
        current = DeltaPass(masks, indices(last_ancestors(seen, self._kernel), self._device))
        for layer in self.layers.values():
            layer.begin(current)

    def append(self, rows: int) -> None:
        for layer in self.layers.values():
            layer.append(rows)
        self._length += rows

    def commit(self, rows: int) -> None:
        if rows - self.first >= AT_ONCE:
            self._fold(rows)

    @torch.inference_mode()
    def keep(self, mask: Bool) -> None:
        slots = np.flatnonzero(mask)
        if len(slots) < self._length:
            first = int(mask.argmin())  # those before it stay in place
            moved = indices(slots[first:], self._device)
            for layer in self.layers.values():
                layer.keep(first, moved)
            self._length = len(slots)

    @torch.inference_mode()
    def _fold(self, rows: int) -> None:
        while self.first < rows:
            end = min(rows, (self.first // GRID + 1) * GRID)
            if self.first < self._snapshot:
                end = min(end, self._snapshot)
            for layer in self.layers.values():
                layer.fold(end - self.first)
            self._length -= end - self.first
            self._folded(end)

    def _folded(self, rows: int) -> None:
        self.first = rows
        if rows % GRID == 0 or rows == self._snapshot:
            self._snapshots[rows] = [layer.snapshot() for layer in self.layers.values()]
            for oldest in [at for at in self._snapshots if at != self._snapshot][:-_KEPT]:
                del self._snapshots[oldest]

    def snapshot_at(self, rows: int) -> None:
        self._snapshot = rows

    @torch.inference_mode()
    def retain(self, rows: int) -> None:
        """Keep no more than the snapshots that a session may begin with: a stage may have folded more."""
        self._fold(rows)
        held = [at for at in self._snapshots if at <= rows]
        newest = [at for at in held if at % GRID == 0][-REUSABLE:]
        self._snapshots = {at: self._snapshots[at] for at in held if at in newest or at == self._snapshot}
        self.first, self._length, self.capacity = rows, 0, 0
        for layer in self.layers.values():
            layer.clear()

    @torch.inference_mode()
    def truncate(self, rows: int) -> None:
        if rows not in self._snapshots:
            raise ProtocolError(f"a session cannot begin with {rows} rows of a text whose recurrent layers "
                                f"kept the states after {list(self._snapshots) or 'none'}")
        self._snapshots = {at: states for at, states in self._snapshots.items() if at <= rows}
        for layer, state in zip(self.layers.values(), self._snapshots[rows], strict=True):
            layer.restore(state)
        self.first, self._length, self._snapshot = rows, 0, 0

    def fill(self, rows: int) -> None:
        self.first = rows

    def visible(self, mask: Bool, positions: Int32, columns: Int32) -> Bool:
        return mask[:, self.first:]

    def rows(self) -> dict[int, Tensor]:
        """The states."""
        return {index: layer.state for index, layer in self.layers.items()}
