"""A session's state on one stage: cache, commits, prunes and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Int32, Prune, Segment
from flowspec_edge.stage.layers.kv_cache import KVCache
from flowspec_edge.stage.rows import member

COUNTERS = (
    "segments",  # computed, empty ones included
    "rows",  # that went through the layers
    "pruned_rows",  # taken out of segments, before or after the layers
    "pruned_cached",  # dropped from the cache: pruned, or not committed
    "orphan_rows",  # whose ancestor had been dropped here
    "cancelled",  # segments that came out empty because of a Cancel
    "dropped_stale",  # messages of another session, an older epoch, or a run seen before
    "dropped_session",  # of these, messages whose session is not open
)


def dead(prune: Prune, numbers: Int32) -> NDArray[np.bool_]:
    """Which of ``numbers`` [n] the prune drops: bool [n]."""
    concerned = (numbers >= prune.start) & (numbers < prune.stop)
    return concerned & ~member(numbers, prune.keep)


class PendingPrunes:
    """The prunes that may still apply to rows which have not arrived yet."""

    def __init__(self) -> None:
        self._remembered: dict[int, Prune] = {}  # by sequence, so that a repeated one counts once
        self._arrived = 0  # no row with a smaller number can arrive any more

    def __len__(self) -> int:
        return len(self._remembered)

    def add(self, prune: Prune) -> None:
        if prune.stop > self._arrived:
            self._remembered[prune.sequence] = prune

    def discard_before(self, first: int) -> None:
        """Forget the prunes that cannot apply to rows from number ``first`` on."""
        self._arrived = first
        self._remembered = {s: prune for s, prune in self._remembered.items() if prune.stop > first}

    def dead(self, numbers: Int32) -> NDArray[np.bool_]:
        dropped = np.zeros(len(numbers), dtype=bool)
        for prune in self._remembered.values():
            dropped |= dead(prune, numbers)
        return dropped


@dataclass(eq=False)
class Session:
    """Rows and runs are numbered per session."""

    session: int
    epoch: int
    cache: KVCache
    base: int = 0  # every cached number below it is committed
    run: int | None = None  # the newest admitted
    prunes: PendingPrunes = field(default_factory=PendingPrunes)
    cancelled: set[int] = field(default_factory=set)
    computing: bool = False
    deferred: list[Prune] = field(default_factory=list)  # arrived while computing, for the cache
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def check(self, segment: Segment) -> None:
        """ProtocolError if the segment does not follow the previous one, or names missing rows."""
        name = f"segment {segment.run} of session {segment.session}"
        if segment.run != (0 if self.run is None else self.run + 1):
            after = "first" if self.run is None else f"after segment {self.run}"
            raise ProtocolError(f"{name} came {after}: one is lost")
        if segment.base < self.base:
            raise ProtocolError(f"{name}: base {segment.base} is behind {self.base}")
        if len(segment.numbers) > self.cache.capacity:
            raise ProtocolError(f"{name}: {len(segment.numbers)} rows are more than the session's capacity "
                                f"of {self.cache.capacity}")
        held = self.cache.numbers
        if len(held) and len(segment.numbers) and segment.numbers[0] <= held[-1]:
            raise ProtocolError(f"{name}: number {segment.numbers[0]} is not above {held[-1]}, held already")
        known = member(segment.committed, held) | member(segment.committed, segment.numbers)
        if not known.all():
            raise ProtocolError(f"{name}: committed number {segment.committed[~known][0]} is not here")

    def commit(self, segment: Segment) -> None:
        """Apply the segment's commits: every other number below the new base is dead."""
        held = self.cache.numbers
        self._drop_cached((held < self.base) | (held >= segment.base) | member(held, segment.committed))
        self.base = segment.base

    def prune(self, message: Prune) -> None:
        self.prunes.add(message)
        if self.computing:
            self.deferred.append(message)
        else:
            self._drop_cached(~dead(message, self.cache.numbers))

    def apply_deferred(self) -> None:
        deferred, self.deferred = self.deferred, []
        for message in deferred:
            self._drop_cached(~dead(message, self.cache.numbers))

    def _drop_cached(self, keep: NDArray[np.bool_]) -> None:
        self.counters["pruned_cached"] += self.cache.keep(keep)
