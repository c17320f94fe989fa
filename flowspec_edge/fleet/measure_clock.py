"""How measured times become one figure.

On a quiet machine the lower quartile is within a few percent of the median; where something else
runs at times, and a run can only become longer by it, it stays where the median is drawn away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_QUANTILE = 0.25


def typical(seconds: Sequence[float]) -> float:
    """The time that a quarter of the runs did not exceed."""
    return float(np.quantile(np.asarray(seconds), _QUANTILE))


def typical_sum(runs: Sequence[Sequence[float]]) -> float:
    """Steps of runs that all did the same, [runs][steps]: the sum of each step's typical time."""
    return float(np.quantile(np.asarray(runs), _QUANTILE, axis=0).sum())
