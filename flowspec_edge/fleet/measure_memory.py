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


@dataclass(frozen=True)
class Gpu:
    """What CUDA says of a GPU's memory, 10^6 bytes.

    integrated  it is the system's own, as on a Jetson: what CUDA calls free then leaves out the page cache,
                which the system reclaims when a process asks for memory
    """

    free_mb: float
    total_mb: float
    integrated: bool


def read_gpu(device: str) -> Gpu | None:
    """None on a CPU."""
    if device == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return Gpu(free / 1e6, total / 1e6, bool(torch.cuda.get_device_properties(device).is_integrated))


def room(board: Board, gpu: Gpu | None) -> Room:
    """By MemAvailable where the system's memory is what is used, else by the GPU's own.

    FlowspecError if the system does not tell its memory.
    """
    if board.total_mb is None or board.available_mb is None:
        raise FlowspecError("/proc/meminfo does not tell this machine's memory: devices run Linux")
    own = gpu is not None and not gpu.integrated
    total, free = (gpu.total_mb, gpu.free_mb) if gpu and own else (board.total_mb, board.available_mb)
    return Room(total, max(1.0, free - _MARGIN * total))


def used_mb(board: Board, gpu: Gpu | None) -> float:
    """What all processes hold of the memory that :func:`room` is of, 10^6 bytes: what has become unavailable
    between two readings is what was taken, in CUDA's buffers and in processes, each byte once.  Page cache
    counts as available."""
    if gpu and not gpu.integrated:
        return gpu.total_mb - gpu.free_mb
    return (board.total_mb or 0.0) - (board.available_mb or 0.0)


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
    del source, target, works, work
    if device != "cpu":
        torch.cuda.empty_cache()  # or the allocator keeps what stages are to be measured in
    return best / 1e9


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
