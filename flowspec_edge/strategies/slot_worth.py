"""How many rows a slot is worth where every row costs time, as with experts: row n goes if its worth is above
its time at the present rate.

A pipeline moves at the pace of the longest segment in it.  So a segment that takes longer than those in
flight beside it costs the difference once in every turn in which none of them is as long, up to once per
stage, and nothing while an equally long one is still ahead of it.  A constant number of rows is therefore
cheaper than the same number now and then (docs/experiments/flowspec.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

_NEWEST = 16  # segments that make the present rate


class SlotWorth:
    """For one pipeline; call :meth:`sent` for every segment."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        # Of each segment: tokens expected, seconds.
        self._sent: deque[tuple[float, float]] = deque(maxlen=max(_NEWEST, stages))

    def best(self, tokens: Sequence[float], times: Sequence[float], least: float) -> int:
        """The index of the choice that is worth most; of equal ones the last, whose rows are free.

        tokens  expected of each choice; times: its seconds in a stage, increasing
        least   seconds of the shortest segment
        """
        newest = list(self._sent)[-_NEWEST:]
        gained, spent = (sum(column) for column in zip(*newest, strict=True)) if newest else (0.0, 0.0)
        rate = gained / spent if gained else tokens[0] / times[0]
        ahead = [seconds for _, seconds in self._sent][1 - self._stages :] if self._stages > 1 else []
        paces = [max([least, *ahead[turn:]]) for turn in range(len(ahead))]
        paces += [least] * (self._stages - len(paces))
        delays = np.maximum(0.0, np.subtract.outer(np.asarray(times), np.asarray(paces))).sum(1)
        worth = np.asarray(tokens) - rate * delays
        return len(tokens) - 1 - int(np.argmax(worth[::-1]))

    def sent(self, tokens: float, seconds: float) -> None:
        self._sent.append((tokens, seconds))
