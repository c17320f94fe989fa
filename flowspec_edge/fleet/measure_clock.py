"""How measured times become one figure.

Costs add up to a request's time, so what is wanted is their mean: a quantile would leave out what
only some of the runs pay, a cache that had grown cold, a sleeper that woke up late.  Where something
else runs at times, a few runs become very long by it; they are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

_LONGEST = 0.1  # of the runs


def typical(seconds: Sequence[float]) -> float:
    """The mean without the longest tenth."""
    ordered = np.sort(np.asarray(seconds))
    return float(ordered[: len(ordered) - int(_LONGEST * len(ordered))].mean())


def busy(seconds: float) -> None:
    """Work so long; whoever waits for this process falls asleep meanwhile."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
