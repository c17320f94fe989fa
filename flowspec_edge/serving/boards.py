"""How the boards are: what heartbeats say, and rates from their counters' growth.

Knows the counters' names.  Does not know who sends them or who is shown them.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import pairwise
from typing import Any

from flowspec_edge.runtime.heartbeats import Counters, growth

_WINDOW_S = 1.0  # that rates are of; a little more or less, as heartbeats fall
_SILENT_S = 3.0  # after which a board's last rates are no news
_NEWEST = 8  # heartbeats

VITALS = ("memory_total", "memory_available", "resident", "cache_bytes", "temperature_c", "load", "cpus")
RATES = {"busy": "compute_s", "bytes_in_s": "bytes_in", "bytes_out_s": "bytes_out", "rows_s": "rows"}


class Boards:
    """The newest heartbeats of every place: 0 is D0, i is Vi."""

    def __init__(self) -> None:
        self._beats: dict[int, deque[tuple[float, Counters]]] = {}
        self._lock = threading.Lock()
        self._computed_s, self._rows = 0.0, 0  # D0's own

    def heard(self, place: int, counters: Counters, at: float) -> None:
        """A board's counters, at a moment in seconds of time.monotonic()."""
        with self._lock:
            self._beats.setdefault(place, deque(maxlen=_NEWEST)).append((at, counters))

    def computed(self, seconds: float) -> None:
        """D0 has drafted or verified for so long."""
        self._computed_s += seconds

    def sent(self, rows: int) -> None:
        """D0 has sent a segment."""
        self._rows += rows

    def looked(self, vitals: Counters, at: float) -> None:
        """D0's heartbeat: nobody sends it one."""
        self.heard(0, {**vitals, "compute_s": self._computed_s, "rows": self._rows}, at)

    def event(self, now: float) -> dict[str, Any]:
        """Every place with its vitals, None where they are not known, and its rates a second.

        D0's links are measured at their other ends: what V1 gets and what VN gives.
        """
        with self._lock:
            beats = {place: list(newest) for place, newest in self._beats.items()}
        boards = {place: _board(place, newest, now) for place, newest in sorted(beats.items())}
        if 0 in boards and len(boards) > 1:
            boards[0]["bytes_out_s"] = boards[min(set(boards) - {0})]["bytes_in_s"]
            boards[0]["bytes_in_s"] = boards[max(boards)]["bytes_out_s"]
        return {"at": now, "boards": list(boards.values())}


def _board(place: int, beats: list[tuple[float, Counters]], now: float) -> dict[str, Any]:
    at, newest = beats[-1]
    first = next((i for i in reversed(range(len(beats))) if at - beats[i][0] >= 0.9 * _WINDOW_S), 0)
    grown, seconds = _growth([counters for _, counters in beats[first:]]), at - beats[first][0]
    current = seconds > 0 and now - at < _SILENT_S
    board: dict[str, Any] = {"place": place}
    board |= {name: newest.get(name) for name in VITALS}
    board |= {name: grown[key] / seconds if current else 0.0 for name, key in RATES.items()}
    board["busy"] = min(1.0, board["busy"])  # a long segment is booked when it ends
    return board


def _growth(beats: list[Counters]) -> Counters:
    """How much was added from the first to the last."""
    grown = dict.fromkeys(RATES.values(), 0.0)
    for before, after in pairwise(beats):
        for key, added in growth(before, after, grown).items():
            grown[key] += added
    return grown
