"""Predicts when V1 becomes idle, to decide whether to send a segment before a draft pass.

A strategy builds a segment at the last moment, when V1 has a free slot. But D0 cannot send while it computes,
and a draft pass takes a fifth of a slot at four stages, and more than half of a slot at fourteen. So before a
pass that would outlast V1's current segment, D0 queues the next segment at V1 *ahead* of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

_NEWEST = 9  # durations that are kept of each kind of work
# The estimate is this element of the sorted durations: a late credit makes a duration too long, and a pruned
# segment takes no time.
_RANK = 2


class SlotPredictor:
    """Estimates durations by kind of work from the most recent ones; all times are in seconds."""

    def __init__(self) -> None:
        self._durations: dict[Hashable, deque[float]] = {}
        self._queue: list[tuple[int, float]] = []  # at V1, in order: rows, and the earliest start

    def add_duration(self, kind: Hashable, seconds: float) -> None:
        self._durations.setdefault(kind, deque(maxlen=_NEWEST)).append(seconds)

    def seconds(self, kind: Hashable) -> float | None:
        """Return the estimate for this kind; None without observations."""
        durations = self._durations.get(kind)
        return sorted(durations)[min(_RANK, len(durations) - 1)] if durations else None

    def sent(self, rows: int, now: float) -> None:
        self._queue.append((rows, now))

    def segment_done(self, now: float) -> None:
        """D0 learns that V1 has finished the oldest segment in its queue."""
        rows, begun = self._queue.pop(0)
        expected = self.seconds(_size(rows))
        self.add_duration(_size(rows), now - begun)
        if self._queue:
            # The next segment began when V1 became free; a busy D0 may learn that late.
            free = now if expected is None else min(now, begun + expected)
            following, sent = self._queue[0]
            self._queue[0] = following, max(sent, free)

    def outlasts(self, kind: Hashable, now: float) -> bool:
        """Return whether D0's work, started now, would end after V1 has run out of segments. False unless
        exactly one segment is at V1 and both durations are known."""
        if len(self._queue) != 1:
            return False
        rows, begun = self._queue[0]
        there, here = self.seconds(_size(rows)), self.seconds(kind)
        return there is not None and here is not None and begun + there < now + here


def _size(rows: int) -> tuple[str, int]:
    """The kind of a segment: row counts with the same bit length."""
    return "rows", rows.bit_length()
