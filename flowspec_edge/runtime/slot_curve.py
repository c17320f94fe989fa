"""Rows of a segment -> what it takes in the slowest stage, learned from what the stages report.

A strategy that sizes its segments by that curve (``Pipeline.slot_seconds``) is told it by a profile in
virtual time and under emulation.  Elsewhere the stages tell D0 when they computed each segment
(``messages.Computed``), and this is what D0 makes of it.

Only row counts that were sent are ever seen, so what is not known is judged optimistically: a guess that
is too low leads to segments of that size and is put right by their reports; one that is too high would
never be tried again.  Between two sizes that were seen, a segment is thought to take as long as the
smaller one until its work is in proportion to the larger one's (a roofline), and for a quarter of the way
in any case; beyond the largest one, as long as that one up to twice its rows.  For the same reason a size
is forgotten that was not seen for long.

What a row takes over a link is not learned from reports: when a segment left one stage and reached the
next is known on two clocks alone, which drift apart.  A driver measures it once, by a round trip.
Knows no clock and no message; times are seconds.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

WARM_UP_ROWS = (16, 64, 1)  # sizes of which a driver has a few computed before the first request
_NEWEST = 9  # segments of a size that count; of these the lower quartile: delays only ever add
_WINDOW = 2048  # segments of a stage after which one is forgotten: some minutes on boards
_ROWS = 256  # up to which the curve is kept; beyond, time grows in proportion
_FLAT = 16  # rows that are thought to take as long as one before anything was reported
_ALL = np.arange(1, _ROWS + 1)


class SlotCurve:
    """What all stages have reported of late, as one curve that never falls as rows grow.

    link_row_s  what each row takes over the link after a stage, in seconds
    """

    def __init__(self) -> None:
        self.link_row_s = 0.0
        self._stages: dict[int, _Stage] = {}
        self._table: list[float] | None = None  # for 1, 2, … _ROWS rows; None until it is asked for

    def observe(self, stage: int, rows: int, seconds: float) -> None:
        """``stage`` computed a segment of ``rows`` rows in so many seconds.

        One without rows was pruned or cancelled and tells nothing.
        """
        if 0 < rows <= _ROWS and seconds > 0:
            self._stages.setdefault(stage, _Stage()).observe(rows, seconds)
            self._table = None

    def clear(self) -> None:
        """Forget what the stages have reported, as when others may have taken their places."""
        self._stages.clear()
        self._table = None

    def seconds(self, rows: int) -> float:
        """What a segment of ``rows`` rows takes in the slowest stage and over the link after it.

        Before the first report one of up to 16 rows takes 1: sizes compare, though the unit is arbitrary.
        """
        if self._table is None:
            curves = [stage.table() for stage in self._stages.values()]
            curve = np.max(curves, axis=0) if curves else np.maximum(1.0, _ALL / _FLAT)
            self._table = curve.tolist()
        computed = self._table[min(max(rows, 1), _ROWS) - 1] * max(1.0, rows / _ROWS)
        return computed + (self.link_row_s * rows if self._stages else 0.0)


class _Stage:
    """One stage's curve."""

    def __init__(self) -> None:
        self._count = 0  # segments
        self._newest: dict[int, deque[float]] = {}  # seconds, by rows
        self._last: dict[int, int] = {}  # the newest segment of so many rows
        self._judged: dict[int, float] = {}  # seconds, by rows
        self._table: NDArray[np.float64] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        self._count += 1
        self._last[rows] = self._count
        newest = self._newest.setdefault(rows, deque(maxlen=_NEWEST))
        newest.append(seconds)
        self._judged[rows] = sorted(newest)[len(newest) // 4]
        self._table = None

    def table(self) -> NDArray[np.float64]:
        """Seconds for 1, 2, … rows, float64 [_ROWS]."""
        if self._table is None:
            for rows in [rows for rows, last in self._last.items() if last <= self._count - _WINDOW]:
                del self._newest[rows], self._last[rows], self._judged[rows]
            sizes, seconds = zip(*sorted(self._judged.items()), strict=True)
            self._table = _curve(np.array(sizes), np.array(seconds))
        return self._table


def _curve(sizes: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The times of these sizes, and of those that were not seen; both arrays [n], n > 0, sizes increasing."""
    # A smaller segment takes no longer than a larger one did; to let the larger one count for more
    # errs towards what will be tried.
    times = np.minimum.accumulate(seconds[::-1])[::-1]
    rows = _ALL
    above = np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)  # the next larger size that was seen
    below = np.maximum(above - 1, 0)
    near = rows <= sizes[below] + np.maximum(1, (sizes[above] - sizes[below]) / 4)
    rising = np.minimum(np.interp(rows, sizes, times), times[above] * rows / sizes[above])
    guess = np.where(near, times[below], np.maximum(times[below], rising))
    beyond = times[-1] * np.maximum(1.0, rows / (2 * sizes[-1]))
    curve: NDArray[np.float64] = np.select([rows > sizes[-1], rows == sizes[above]], [beyond, times[above]],
                                           guess)
    return curve
