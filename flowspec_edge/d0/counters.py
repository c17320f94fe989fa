"""Growth of heartbeat counters since the previous heartbeat, and a stage's log line.

The line has the level INFO:

    V2  compute   61 ms  wait   12 ms  in   1.2 MB  out   1.2 MB  rows   412  tokens    31
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flowspec_edge.messages import Heartbeat

log = logging.getLogger(__name__)

HeartbeatCounters = dict[str, float]

_SHOWN = ("compute_s", "wait_s", "bytes_in", "bytes_out", "rows", "tokens")
_UNITS = ("B", "kB", "MB", "GB")


def increase(before: HeartbeatCounters, after: HeartbeatCounters, keys: Iterable[str]) -> HeartbeatCounters:
    """Return each key's growth since the stage's previous heartbeat ({}: none); missing counters are 0.

    A stage resets its counters with each session that no other overlaps; ``since`` names that session. If it
    changed, all counts are new, even if they exceed the previous ones.
    """
    is_same_start = before.get("since") == after.get("since")
    return {key: after.get(key, 0.0) - (before.get(key, 0.0) if is_same_start else 0.0) for key in keys}


class LiveLines:
    def __init__(self) -> None:
        self._before: dict[int, HeartbeatCounters] = {}

    def show(self, beat: Heartbeat) -> None:
        """Log the stage's line, unless it was idle."""
        counters = self.added(beat)
        if log.isEnabledFor(logging.INFO) and (counters["compute_s"] or counters["rows"]):
            log.info("%s", line(beat.stage, counters))

    def added(self, beat: Heartbeat) -> HeartbeatCounters:
        before = self._before.get(beat.stage, {})
        self._before[beat.stage] = beat.counters
        return increase(before, beat.counters, _SHOWN)


def line(stage: int, counters: HeartbeatCounters) -> str:
    return (f"V{stage:<2} compute {counters['compute_s'] * 1e3:6.0f} ms"
            f"  wait {counters['wait_s'] * 1e3:6.0f} ms"
            f"  in {_size(counters['bytes_in']):>8}  out {_size(counters['bytes_out']):>8}"
            f"  rows {counters['rows']:5.0f}  tokens {counters['tokens']:5.0f}")


def _size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count:.0f} B"
