"""Times of work on a torch device, and how fast that device copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_COPY_BYTES = 256 * 1024**2
_LEAST, _MOST = 3, 30
_ENOUGH_S = 1.0


def median_seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Of ``work``, begun and finished on the device: three runs at least, 30 at most, and no more once they
    have taken a second; one before them is not counted."""
    seconds_of(work, device)
    seconds: list[float] = []
    while len(seconds) < _LEAST or (len(seconds) < _MOST and sum(seconds) < _ENOUGH_S):
        seconds.append(seconds_of(work, device))
    return statistics.median(seconds)


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Of one run."""
    _finish(device)
    start = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start


def copy_rate(device: str) -> float:
    """Bytes read and written a second by a large copy on the device."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / median_seconds(lambda: target.copy_(source), device)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
