"""What a stage knows of a session: its cache, the commits and prunes so far, and its counters.

Does not know what follows from them (``engine``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowspec_edge.messages import Prune
from flowspec_edge.stage.cache import KVCache
from flowspec_edge.stage.prunes import Prunes

COUNTERS = (
    "segments",  # computed, empty ones included
    "rows",  # that went through the layers
    "pruned_rows",  # taken out of segments, before or after the layers
    "pruned_cached",  # dropped from the cache: pruned, or not committed
    "orphan_rows",  # whose ancestor had been dropped here
    "cancelled",  # segments that came out empty because of a Cancel
    "dropped_stale",  # messages of another session, an older epoch, or a run seen before
)


@dataclass(eq=False)
class Session:
    """One session; rows and runs are numbered within it."""

    session: int
    epoch: int
    cache: KVCache
    base: int = 0  # every cached number below it is committed
    run: int | None = None  # the newest admitted
    prunes: Prunes = field(default_factory=Prunes)
    cancelled: set[int] = field(default_factory=set)
    computing: bool = False
    deferred: list[Prune] = field(default_factory=list)  # came while computing; not yet in the cache
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
