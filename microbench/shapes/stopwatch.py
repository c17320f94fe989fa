from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from flowspec_edge.boards.measurement.memory import seconds_of

_COPY_BYTES = 256 * 1024**2
_LEAST, _MOST = 3, 30
_ENOUGH_S = 1.0


def median_seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Return the median over 3 to 30 runs of ``work`` after a warm-up, as many as fit in a second."""
    seconds_of(work, device)
    seconds: list[float] = []
    while len(seconds) < _LEAST or (len(seconds) < _MOST and sum(seconds) < _ENOUGH_S):
        seconds.append(seconds_of(work, device))
    return statistics.median(seconds)


def copy_rate(device: str) -> float:
    """Measure the bytes that a large copy reads and writes a second."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / median_seconds(lambda: target.copy_(source), device)
