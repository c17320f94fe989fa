from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(work: Callable[[], object], device: str) -> float:
    """One run of ``work``, completed on the device."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
