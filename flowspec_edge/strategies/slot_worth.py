"""How many rows a slot is worth where every row costs time, as with experts.

A pipeline moves at the pace of the longest segment in it, so a segment that is longer than the others costs
its excess once per stage.  Numbers that follow the worth of the moment are slower than the best constant one
(docs/experiments/flowspec.md).  So the number changes slowly: row n is sent if what the n-th rows have been
worth lately is above their time at the rate that they give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_RANKS = 64
_NEWEST = 0.1  # weight of the newest slot in the mean


class SlotWorth:
    """For one pipeline; asked once for every segment."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._mean: NDArray[np.float64] | None = None  # probability of the n-th row, [_RANKS]

    def rows(self, probabilities: Sequence[float], seconds: Callable[[int], float], base_rows: int = 0) -> int:
        """How many of the rows go, likeliest first; ``base_rows``: rows that go in any case.

        seconds  of a segment in a stage, by its rows
        """
        newest = np.zeros(_RANKS)
        newest[: len(probabilities)] = probabilities[:_RANKS]
        if len(probabilities):
            self._mean = newest if self._mean is None else self._mean + _NEWEST * (newest - self._mean)
        if self._mean is None:
            return 0
        least, sizes = seconds(1), range(1, _RANKS + 1)
        times = least + self._stages * np.maximum(0.0, np.array([seconds(rows) for rows in sizes]) - least)
        rates = self._mean.cumsum() / times
        # The last of equal maxima: on a flat piece of the curve further rows are free.
        best = _RANKS - int(np.argmax(rates[::-1]))
        return min(len(probabilities), max(0, best - base_rows))
