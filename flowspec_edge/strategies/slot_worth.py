"""How many rows a slot is worth where every row costs time, as with experts.

A pipeline moves at the pace of the longest segment in it, so numbers of rows that follow the worth of the
moment are slower than the best constant one (docs/experiments/flowspec.md).  So the number changes slowly:
row n is sent if what the n-th rows have been worth lately is above their time at the rate that they give.

Estimates alone ask for too many: where many rows seem likely at once they are half as likely, and a lone row
is likelier than it seems.  So each place in a request's segments is corrected by what came of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.messages import Segment

_RANKS = 64
_NEWEST = 0.1  # weight of the newest slot in the mean
_PRICE = 2.0  # times that a slot's time beyond one row's counts: rows that do not go may go in the next slot
_PRIOR = 4.0  # expected tokens that outcomes have to outweigh


class SlotWorth:
    """For one pipeline; asked once for every segment."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._mean: NDArray[np.float64] | None = None  # probability of the n-th row, [_RANKS]

    def rows(self, probabilities: Sequence[float], seconds: Callable[[int], float], taken: int = 0,
             alone: bool = False) -> int:
        """How many of the rows go, likeliest first; ``taken``: rows that go in any case.

        seconds  of a segment in a stage, by its rows
        alone    the requests have no further rows for the next slot: if they do not share this one, they
                 follow one another through the stages, and each longer slot delays them all
        """
        newest = np.zeros(_RANKS)
        newest[: len(probabilities)] = probabilities[:_RANKS]
        if len(probabilities):
            self._mean = newest if self._mean is None else self._mean + _NEWEST * (newest - self._mean)
        if self._mean is None:
            return 0
        least, sizes = seconds(1), range(1, _RANKS + 1)
        price = self._stages if alone else min(_PRICE, self._stages)
        times = least + price * np.maximum(0.0, np.array([seconds(rows) for rows in sizes]) - least)
        rates = self._mean.cumsum() / times
        # The last of equal maxima: on a flat piece of the curve further rows are free.
        best = _RANKS - int(np.argmax(rates[::-1]))
        return min(len(probabilities), max(0, best - taken))


class PlaceOutcomes:
    """Corrects a request's estimates by what came of earlier rows in the same places of its segments."""

    def __init__(self) -> None:
        self._expected, self._found = np.zeros(_RANKS), np.zeros(_RANKS)  # tokens, by place
        self._open: dict[int, tuple[int, float]] = {}  # place and estimate, by the number of a row in flight

    def corrected(self, estimates: Sequence[float]) -> list[float]:
        """``estimates``: of the next rows, likeliest first.  Places that had no rows are corrected as the
        last one that had."""
        factors = (_PRIOR + self._found) / (_PRIOR + self._expected)
        last = int(np.flatnonzero(self._expected).max(initial=0))
        places = np.minimum(np.arange(len(estimates)), last)
        corrected: list[float] = (np.asarray(estimates) * factors[places]).tolist()
        return corrected

    def sent(self, segment: Segment, estimates: Sequence[float]) -> None:
        """``segment``'s last rows had these estimates.  What it commits tells the outcomes of older ones."""
        text = set(segment.committed.tolist())
        for number in [number for number in self._open if number < segment.base]:
            place, estimate = self._open.pop(number)
            self._expected[place] += estimate
            self._found[place] += number in text
        numbers = segment.numbers[len(segment.numbers) - len(estimates):].tolist()
        for place, (number, estimate) in enumerate(zip(numbers[:_RANKS], estimates, strict=False)):
            self._open[number] = place, estimate
