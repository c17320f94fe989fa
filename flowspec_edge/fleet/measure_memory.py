"""A device's memory: how much of it a stage may use, and how fast it is read.

Knows boards whose GPU shares the memory (Jetson) and those whose GPU has its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.board import Board
from flowspec_edge.fleet.measure_clock import typical

_MARGIN = 0.05  # of the memory, left to the system
_MOST_BYTES = 512 * 1024**2  # of what is read to see how fast
_SHARE = 0.05  # and at most this part of what is free
_REPEATS = 9


@dataclass(frozen=True)
class Room:
    """Memory of a device, 10^6 bytes: all of it, and what a process may take."""

    total_mb: float
    usable_mb: float


def read_room(board: Board, device: str) -> Room:
    """FlowspecError if the system does not tell its memory."""
    if board.total_mb is None or board.available_mb is None:
        raise FlowspecError("/proc/meminfo does not tell this machine's memory: devices run Linux")
    host = Room(board.total_mb, max(1.0, board.available_mb - _MARGIN * board.total_mb))
    if device == "cpu":
        return host
    free, total = (size / 1e6 for size in torch.cuda.mem_get_info())
    own = Room(total, max(1.0, free - _MARGIN * total))
    if torch.cuda.get_device_properties(0).is_integrated:  # the same memory, seen from two sides
        return Room(host.total_mb, min(host.usable_mb, own.usable_mb))
    return own


def read_rate(device: str, usable_mb: float) -> float:
    """10^9 bytes a second: the faster of a large sum and a large copy, by what they read."""
    count = int(min(_MOST_BYTES, usable_mb * 1e6 * _SHARE)) // 4
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    best = 0.0
    works: tuple[Callable[[], object], ...] = (source.sum, partial(target.copy_, source))
    for work in works:
        seconds = []
        for _ in range(_REPEATS):
            _finish(device)
            start = time.perf_counter()
            work()
            _finish(device)
            seconds.append(time.perf_counter() - start)
        best = max(best, 4 * count / typical(seconds))
    return best / 1e9


def device_used_mb() -> float:
    """What all processes together hold of the GPU's memory, 10^6 bytes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
