"""The live line of a stage, from its heartbeats.

    V2  compute   61 ms  wait   12 ms  in   1.2 MB  out   1.2 MB  rows   412  tokens    31

Each line says what the stage did since its line before.  Knows heartbeat counters; does not know
who sends them or where lines go (``logging``, level INFO).
"""

from __future__ import annotations

import logging

from flowspec_edge.messages import Heartbeat
from flowspec_edge.runtime.heartbeats import Counters, growth

log = logging.getLogger(__name__)

_SHOWN = ("compute_s", "wait_s", "bytes_in", "bytes_out", "rows", "tokens")
_UNITS = ("B", "kB", "MB", "GB")


class LiveLines:
    """Remembers every stage's counters, to show what has been added."""

    def __init__(self) -> None:
        self._before: dict[int, Counters] = {}

    def show(self, beat: Heartbeat) -> None:
        """Log the stage's line, unless it has done nothing."""
        added = self.added(beat)
        if log.isEnabledFor(logging.INFO) and (added["compute_s"] or added["rows"]):
            log.info("%s", line(beat.stage, added))

    def added(self, beat: Heartbeat) -> Counters:
        """The counters' growth since the stage's heartbeat before."""
        before = self._before.get(beat.stage, {})
        self._before[beat.stage] = beat.counters
        return growth(before, beat.counters, _SHOWN)


def line(stage: int, counters: Counters) -> str:
    """One stage's line; columns keep their places."""
    return (f"V{stage:<2} compute {counters['compute_s'] * 1e3:6.0f} ms"
            f"  wait {counters['wait_s'] * 1e3:6.0f} ms"
            f"  in {_size(counters['bytes_in']):>8}  out {_size(counters['bytes_out']):>8}"
            f"  rows {counters['rows']:5.0f}  tokens {counters['tokens']:5.0f}")


def _size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count:.0f} B"
