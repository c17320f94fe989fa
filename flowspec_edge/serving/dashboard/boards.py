"""The boards' state from heartbeats, and rates from the growth of their counters."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flowspec_edge.runtime.observe.counters import HeartbeatCounters, increase
from flowspec_edge.runtime.observe.power import once_per_board

_WINDOW_S = 1.0  # over which rates are averaged, approximately
_SILENT_S = 3.0  # after which a board's rates are shown as 0
_NEWEST = 8  # heartbeats

SYSTEM_STATS = ("memory_total", "memory_available", "resident", "cache_bytes", "temperature_c", "load",
                "cpus", "watts")
RATES = {"busy": "compute_s", "bytes_in_s": "bytes_in", "bytes_out_s": "bytes_out", "rows_s": "rows"}


@dataclass
class Losses:
    """Of a place. since   when it was lost, of time.monotonic(); None: it is not lost
    away_s  how long it was away the last time
    """

    count: int = 0
    since: float | None = None
    away_s: float | None = None

    def event(self) -> dict[str, Any]:
        return {"lost": self.since is not None, "losses": self.count, "away_s": self.away_s}


class Boards:
    """The newest heartbeats by place, and when places were lost: 0 is D0, i is Vi."""

    def __init__(self) -> None:
        self._losses: dict[int, Losses] = {}
        self._beats: dict[int, deque[tuple[float, HeartbeatCounters]]] = {}
        self._lock = threading.Lock()
        self._computed_s, self._rows = 0.0, 0  # D0's own

    def add_heartbeat(self, place: int, counters: HeartbeatCounters, at: float) -> None:
        """``at``: seconds of time.monotonic()."""
        with self._lock:
            self._beats.setdefault(place, deque(maxlen=_NEWEST)).append((at, counters))

    def missing(self, places: Collection[int], at: float) -> None:
        """These are lost now, and no others."""
        with self._lock:
            for place in places:
                losses = self._losses.setdefault(place, Losses())
                if losses.since is None:
                    losses.count, losses.since = losses.count + 1, at
            for place, losses in self._losses.items():
                if losses.since is not None and place not in places:
                    losses.away_s, losses.since = at - losses.since, None

    def losses(self, place: int) -> dict[str, Any]:
        """``lost``, ``losses`` since the start, ``away_s``: seconds that the last loss took, or None."""
        with self._lock:
            return self._losses.get(place, Losses()).event()

    def computed(self, seconds: float) -> None:
        self._computed_s += seconds

    def sent(self, rows: int) -> None:
        self._rows += rows

    def sample(self, system_stats: HeartbeatCounters, at: float) -> None:
        """Record D0's own state: D0 sends no heartbeats."""
        self.add_heartbeat(0, {**system_stats, "compute_s": self._computed_s, "rows": self._rows}, at)

    def event(self, now: float) -> dict[str, Any]:
        """Return each place's system stats, None where unknown, and its rates per second. D0's links are
        measured at their other ends: what V1 receives and what VN sends.

        host  the first place on the same machine
        """
        with self._lock:
            beats = {place: list(newest) for place, newest in self._beats.items()}
        boards = {place: _board(place, newest, now) for place, newest in sorted(beats.items())}
        counted = once_per_board({place: beats[place][-1][1] for place in boards})
        hosts: dict[float, int] = {}
        for place, board in boards.items():
            board["watts"] = counted[place].get("watts")
            machine = beats[place][-1][1].get("machine")
            board["host"] = place if machine is None else hosts.setdefault(machine, place)
        if 0 in boards and len(boards) > 1:
            boards[0]["bytes_out_s"] = boards[min(set(boards) - {0})]["bytes_in_s"]
            boards[0]["bytes_in_s"] = boards[max(boards)]["bytes_out_s"]
        return {"at": now, "boards": list(boards.values())}


def _board(place: int, beats: list[tuple[float, HeartbeatCounters]], now: float) -> dict[str, Any]:
    at, newest = beats[-1]
    first = next((i for i in reversed(range(len(beats))) if at - beats[i][0] >= 0.9 * _WINDOW_S), 0)
    grown, seconds = dict.fromkeys(RATES.values(), 0.0), at - beats[first][0]
    for (_, before), (_, after) in pairwise(beats[first:]):
        for key, added in increase(before, after, grown).items():
            grown[key] += added
    current = seconds > 0 and now - at < _SILENT_S
    board: dict[str, Any] = {"place": place}
    board |= {name: newest.get(name) for name in SYSTEM_STATS}
    board |= {name: grown[key] / seconds if current else 0.0 for name, key in RATES.items()}
    board["busy"] = min(1.0, board["busy"])  # a long segment is counted when it ends
    return board
