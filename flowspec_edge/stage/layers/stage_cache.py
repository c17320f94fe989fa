"""A session's cache in a stage: its rows, and what the layers of each kind keep of them.

    memory = StageMemory({kind: kind.arena(layers, dtype, device, rows) for kind, layers in …})
    cache = memory.take(capacity, tentative)     # a session's: numbers, positions, and ``parts`` by kind
    cache.reserve(n); …; cache.append(numbers, positions)     # around a pass, in which the layers write
    cache.keep(mask); cache.commit(n)            # prunes and commits, for all kinds alike

A kind is a value that says how layers remember rows (``kinds``: keys and values, of all rows or of a window;
``recurrent``: a state).
Every kind sees the same rows in the same order, committed ones first.  It may cease to hold the oldest
committed rows one by one: those that no later row sees, or that are folded into a state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.messages import Int32, Payload, Segment

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Bool = NDArray[np.bool_]


class LayerCache(Protocol):
    """What a session's layers of one kind hold.

    first     rows at the session's beginning that they do not hold one by one
    capacity  rows that fit
    """

    first: int
    capacity: int

    def __len__(self) -> int:
        """Rows held one by one: the session's from ``first`` on."""

    def reserve(self, rows: int) -> None:
        """Before a pass of ``rows`` rows.  FlowspecError unless they fit."""

    def append(self, rows: int) -> None:
        """Add the rows that every layer has just written; a pass that does not end so leaves no trace."""

    def commit(self, rows: int) -> None:
        """Make the session's first ``rows`` rows text, at least as many as before."""

    def keep(self, mask: Bool) -> None:
        """Drop the held rows where ``mask`` [len] is False."""

    def retain(self, rows: int) -> None:
        """All held rows are text, of ``rows`` rows, and no more are to come until the arena widens the cache.

        ProtocolError if it would be cut where its kind cannot go on from (``reusable``).
        """

    def truncate(self, rows: int) -> None:
        """Keep only the first ``rows`` rows of the text, as many as its kind's ``reusable`` permits.

        ProtocolError for others.
        """

    def snapshot_at(self, rows: int) -> None:
        """Keep what another session needs in order to begin with this text's first ``rows`` rows.

        It stays, however far this session goes on.  At the call, at most ``rows`` rows are text.  Raise ProtocolError
        if what is needed is gone already.
        """

    def fill(self, rows: int) -> None:
        """Make an empty cache look as if it held a text of ``rows`` rows of zeros."""

    def visible(self, mask: Bool, positions: Int32, columns: Int32) -> Bool:
        """Return what the pass's rows see here, [n, len + n], of ``mask`` [n, m + n].

        ``positions`` [n], and of all columns [m + n].
        """

    def rows(self) -> dict[int, Tensor]:
        """Return what is held by layer, for tests and measurements."""


class LayerArena(Protocol):
    """The memory of all sessions for the layers of one kind: ``rows`` rows of ``row_bytes`` bytes."""

    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int: ...

    def missing(self, capacity: int, existing: Any = None) -> int:
        """Rows by which it must grow for a cache, or ``existing``, to hold ``capacity``."""

    def take(self, capacity: int) -> Any:
        """Return an empty LayerCache."""

    def widen(self, cache: Any, capacity: int) -> None:
        """Let ``cache`` hold up to ``capacity`` rows, at least as many as now."""

    def give_back(self, cache: Any) -> None: ...


class CacheKind(Hashable, Protocol):
    def rows(self, capacity: int, tentative: int) -> int:
        """Return the most rows that a session of ``capacity`` rows holds, ``tentative`` of them uncommitted."""

    @property
    def takes_memory_each(self) -> bool:
        """Whether a session takes memory whatever its length."""

    def reserved(self, rows: int, requests: int, tentative: int) -> int:
        """Return the rows to allocate at a stage's start, if its caches may hold ``rows`` in all.

        They are those of ``requests`` requests at once (0: any number), with ``tentative`` uncommitted rows each.
        """

    def reusable(self, text: int, limit: int, snapshot: int) -> int:
        """Return the most rows, up to ``limit``, from which a session can go on; 0: none.

        Its text has ``text`` rows, and a snapshot after ``snapshot`` of them (0: none).
        """

    def arena(self, layers: Sequence[int], dtype: torch.dtype, device: torch.device, rows: int) -> LayerArena:
        """Memory for ``rows`` rows of ``layers``, indexes in the whole model."""

    def row_bytes(self, width: int) -> int:
        """Return the bytes of one row in one layer; ``width``: bytes of a value in the compute dtype."""

    def inputs(self, parts: Sequence[Any], index: int, dtype: torch.dtype, device: torch.device, step: int
               ) -> tuple[Any, Any]:
        """Return what the layers take in a pass over ``parts``: (cache, mask).

        The parts' caches have this kind's as ``parts[index]``.  ``step``: rows of the pass are padded to a multiple
        of it.
        """


class StageCache:
    """The rows of one session.

    numbers    [len] int32, increasing (a view, valid until the next change)
    positions  [len] int32
    committed  how many of them, the first ones, are text
    parts      by kind, in the order of the stage's memory
    """

    def __init__(self, capacity: int, parts: Sequence[LayerCache]) -> None:
        self.parts = tuple(parts)
        self.committed = 0
        self._length = 0
        self.renumber(capacity)

    def __len__(self) -> int:
        return self._length

    @property
    def numbers(self) -> Int32:
        return self._numbers[: self._length]

    @property
    def positions(self) -> Int32:
        return self._positions[: self._length]

    def rows(self) -> list[Tensor]:
        """Return what each layer holds, in the order of the layers."""
        by_layer = {layer: tensor for part in self.parts for layer, tensor in part.rows().items()}
        return [by_layer[layer] for layer in sorted(by_layer)]

    def slots(self, numbers: Int32) -> NDArray[np.int64] | None:
        """Return the indexes [n] of ``numbers`` [n], increasing; None if one is missing."""
        cached = self.numbers
        at = cached.searchsorted(numbers)
        if len(at) and (at.max() >= len(cached) or (cached[at] != numbers).any() or (at[1:] <= at[:-1]).any()):
            return None
        return at

    def reserve(self, rows: int) -> None:
        """Before a pass of ``rows`` rows.  FlowspecError unless they fit."""
        if self._length + rows > self.capacity:
            raise FlowspecError(f"KV cache is full: {self._length} rows held, {rows} more to come, "
                                f"capacity {self.capacity}: shorten the request or raise the capacity")
        for part in self.parts:
            part.reserve(rows)

    def append(self, numbers: Int32, positions: Int32) -> None:
        """Add the rows that every layer has just written; their numbers must exceed all cached ones."""
        end = self._length + len(numbers)
        self._numbers[self._length : end] = numbers
        self._positions[self._length : end] = positions
        self._length = end
        for part in self.parts:
            part.append(len(numbers))

    def fill(self, rows: int) -> None:
        """Make an empty cache look as if it held a text of ``rows`` rows of zeros in every layer."""
        self._length = rows
        for part in self.parts:
            part.fill(rows)

    def keep(self, mask: Bool) -> int:
        """Drop the rows where ``mask`` [len] is False; return how many.

        ProtocolError if a layer does not hold one of them any more, because it is text.
        """
        if mask.all():
            return 0
        first = int(mask.argmin())
        if first < max((part.first for part in self.parts), default=0):
            raise ProtocolError(f"row {self.numbers[first]} is committed: it cannot be dropped")
        return self._drop(mask)

    def _drop(self, mask: Bool) -> int:
        source = np.flatnonzero(mask)
        for part in self.parts:
            part.keep(mask[part.first:])
        self._numbers[: len(source)] = self._numbers[source]
        self._positions[: len(source)] = self._positions[source]
        dropped, self._length = self._length - len(source), len(source)
        return dropped

    def commit(self, rows: int) -> None:
        """Make the first ``rows`` rows text."""
        self.committed = rows
        for part in self.parts:
            part.commit(rows)

    def retain(self, slots: NDArray[np.int64]) -> None:
        """Keep only ``slots`` [n], increasing, as a text renumbered from 0, and no room for more."""
        mask = np.zeros(self._length, dtype=bool)
        mask[slots] = True
        self._drop(mask)
        self.committed = self._length
        for part in self.parts:
            part.retain(self._length)
        self.renumber(self._length)

    def snapshot_at(self, rows: int) -> None:
        """Take a snapshot after the text's first ``rows`` rows, with which a later session is to begin.

        ProtocolError if it cannot.
        """
        if rows < self.committed:
            raise ProtocolError(f"a snapshot after {rows} rows comes too late for a text of {self.committed}")
        for part in self.parts:
            part.snapshot_at(rows)

    def renumber(self, capacity: int) -> None:
        """Renumber the rows from 0, with room for ``capacity``, which the memory has."""
        self.capacity = capacity
        self._numbers = np.arange(capacity, dtype=np.int32)
        self._positions = np.arange(capacity, dtype=np.int32)

    def truncate(self, rows: int) -> None:
        """Keep only the first ``rows`` rows of a text."""
        self._length = self.committed = rows
        for part in self.parts:
            part.truncate(rows)


@dataclass(eq=False)
class Part:
    """A segment in a pass.

    mask   [n, len(cache) + n] bool, True where a row sees a column
    columns  [len(cache) + n] int32, their positions
    ended  the session or the run has ended during the pass: the cache must not be touched any more
    experts  touched by its rows, as ``experts.touched`` says, once computed
    """

    segment: Segment
    cache: StageCache
    mask: Bool
    columns: Int32
    ended: bool = False
    experts: tuple[int, float] = (0, 0.0)

    def __len__(self) -> int:
        return len(self.segment.numbers)


class PartResult(NamedTuple):
    """What a pass gives for a part.

    taps    layers passed, and the rows' hidden states [n, H] there
    hidden  [n, H] after the stage's last layer
    """

    taps: list[tuple[int, Payload]]
    hidden: Payload


class StageMemory:
    """The memory of all sessions' caches, by kind of layer."""

    def __init__(self, arenas: Mapping[CacheKind, LayerArena]) -> None:
        self.arenas = dict(arenas)

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas.values())

    @property
    def rows(self) -> int:
        """Rows for which memory is allocated, in the kind that has most."""
        return max((arena.rows for arena in self.arenas.values()), default=0)

    def missing(self, capacity: int, tentative: int, existing: StageCache | None = None) -> int:
        """Return how many bytes the memory must grow so that a cache can hold ``capacity`` rows.

        The cache is ``existing``, or a new one if that is None.
        """
        parts = existing.parts if existing else (None,) * len(self.arenas)
        return sum(arena.missing(kind.rows(capacity, tentative), part) * arena.row_bytes
                   for (kind, arena), part in zip(self.arenas.items(), parts, strict=True))

    def take(self, capacity: int, tentative: int) -> StageCache:
        """Return an empty cache for ``capacity`` rows, of which ``tentative`` may be uncommitted.

        May move the other caches' rows.
        """
        parts: list[LayerCache] = []
        try:
            for kind, arena in self.arenas.items():
                parts.append(arena.take(kind.rows(capacity, tentative)))
        except BaseException:
            for part, arena in zip(parts, self.arenas.values(), strict=False):
                arena.give_back(part)
            raise
        return StageCache(capacity, parts)

    def widen(self, cache: StageCache, capacity: int, tentative: int) -> None:
        """Let ``cache``, a text's, hold up to ``capacity`` rows.  May move all caches' rows."""
        for (kind, arena), part in zip(self.arenas.items(), cache.parts, strict=True):
            arena.widen(part, max(kind.rows(capacity, tentative), len(part)))
        cache.renumber(capacity)

    def give_back(self, cache: StageCache) -> None:
        for arena, part in zip(self.arenas.values(), cache.parts, strict=True):
            arena.give_back(part)


def reusable(kinds: Iterable[CacheKind], text: int, limit: int, snapshot: int = 0) -> int:
    """Return the rows, at most ``limit``, from which every kind's layers can go on.

    The text has ``text`` rows, and a snapshot was taken after ``snapshot`` of them (0: none).
    """
    distinct, rows = set(kinds), limit
    while (fewer := min((kind.reusable(text, rows, snapshot) for kind in distinct), default=rows)) < rows:
        rows = fewer
    return rows
