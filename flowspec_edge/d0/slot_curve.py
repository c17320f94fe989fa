"""The time of a segment in the slowest stage as a function of its rows, learned from the stages' reports.

Reports tell the times only of the row counts (sizes) that D0 sends. An estimate that is too low corrects
itself, because D0 sends that size and gets its time; one that is too high would never be tried. So unknown
sizes get low estimates. Between two known sizes, a segment takes as long as the smaller one until its work is
in proportion to the larger one's (a roofline), and in any case for a quarter of the way. Beyond the largest
known size, it takes as long as that size up to twice its rows. A size without recent segments is forgotten,
so that D0 tries it again.

Rows that choose experts each cost time, ever less (U(n)), so then sizes in between lie on the straight line,
which is still too low.

The time of a row on a link is not learned, because departure and arrival are read from two clocks that drift
apart. The driver measures that time once, by round trips.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

WARM_UP_ROWS = (16, 64, 1)  # sizes that a driver has the stages compute before the first request
_NEWEST = 9  # segments per size; their lower quartile is the estimate, because delays only add time
_WINDOW = 2048  # segments of a stage after which a size is forgotten; they take some minutes on boards
_ROWS = 256  # the curve's length; beyond, time grows in proportion
_FLAT = 16  # rows that are assumed to take as long as one before the first report
_ALL = np.arange(1, _ROWS + 1)


class SlotCurve:
    """A non-decreasing curve over all stages' recent reports; times are in seconds.

    ``link_row_s``: time of each row on the link after a stage.
    """

    def __init__(self, sparse: bool = False) -> None:
        """Begin without times; ``sparse``: the rows choose experts."""
        self._sparse = sparse
        self.link_row_s = 0.0
        self._stages: dict[int, _Stage] = {}
        self._table: list[float] | None = None  # for 1, 2, … _ROWS rows; None: to be computed

    def observe(self, stage: int, rows: int, seconds: float) -> None:
        """Record a segment's time in ``stage``; segments without rows (pruned, cancelled) are ignored."""
        if 0 < rows <= _ROWS and seconds > 0:
            self._stages.setdefault(stage, _Stage(self._sparse)).observe(rows, seconds)
            self._table = None

    def clear(self) -> None:
        """Forget all reports, because other devices may have replaced the stages."""
        self._stages.clear()
        self._table = None

    def seconds(self, rows: int) -> float:
        """Return the time of ``rows`` rows in the slowest stage and on the link after it.

        Before the first report, the unit is arbitrary: up to 16 rows take 1.
        """
        if self._table is None:
            curves = [stage.table() for stage in self._stages.values()]
            curve = np.max(curves, axis=0) if curves else np.maximum(1.0, _ALL / _FLAT)
            self._table = curve.tolist()
        computed = self._table[min(max(rows, 1), _ROWS) - 1] * max(1.0, rows / _ROWS)
        return computed + (self.link_row_s * rows if self._stages else 0.0)


class _Stage:
    def __init__(self, sparse: bool) -> None:
        self._sparse = sparse
        self._count = 0  # segments
        self._newest: dict[int, deque[float]] = {}  # seconds, by rows
        self._last: dict[int, int] = {}  # the newest segment's count, by rows
        self._table: NDArray[np.float64] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        self._count += 1
        self._last[rows] = self._count
        self._newest.setdefault(rows, deque(maxlen=_NEWEST)).append(seconds)
        self._table = None

    def table(self) -> NDArray[np.float64]:
        """Seconds for 1, 2, … rows, float64 [_ROWS]."""
        if self._table is None:
            for rows in [rows for rows, last in self._last.items() if last <= self._count - _WINDOW]:
                del self._newest[rows], self._last[rows]
            sizes, seconds = zip(*((rows, sorted(newest)[len(newest) // 4])
                                   for rows, newest in sorted(self._newest.items())), strict=True)
            self._table = _curve(np.array(sizes), np.array(seconds), self._sparse)
        return self._table


def _curve(sizes: NDArray[np.int64], seconds: NDArray[np.float64], sparse: bool) -> NDArray[np.float64]:
    """Interpolate to float64 [_ROWS] from observed sizes (increasing) and times, both [n], n > 0."""
    # A smaller segment takes no longer than a larger one. If it seems to, it gets the larger one's time: an
    # estimate that is too low corrects itself.
    times = np.minimum.accumulate(seconds[::-1])[::-1]
    rows = _ALL
    above = np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)  # the next larger observed size
    below = np.maximum(above - 1, 0)
    near = rows <= sizes[below] + np.maximum(1, (sizes[above] - sizes[below]) / 4)
    rising = np.minimum(np.interp(rows, sizes, times), times[above] * rows / sizes[above])
    guess = np.where(near, times[below], np.maximum(times[below], rising))
    if sparse:
        guess = np.interp(rows, sizes, times)
    beyond = times[-1] * np.maximum(1.0, rows / (2 * sizes[-1]))
    curve: NDArray[np.float64] = np.select([rows > sizes[-1], rows == sizes[above]], [beyond, times[above]],
                                           guess)
    return curve
