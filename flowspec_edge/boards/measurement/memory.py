"""Measures how much memory a process may use, and how fast it is read, on integrated and discrete GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from flowspec_edge.boards.measurement.fit import trimmed_mean
from flowspec_edge.boards.probe.board import BoardInfo
from flowspec_edge.errors import FlowspecError

_MARGIN = 0.05  # share of the memory left to the system
_MOST_BYTES = 512 * 1024**2  # read to measure the rate
_SHARE = 0.05  # and at most this share of the free memory
_REPEATS = 9


@dataclass(frozen=True)
class DeviceMemory:
    total_mb: float
    usable_mb: float


@dataclass(frozen=True)
class GpuMemory:
    """CUDA's view, in 10^6 bytes.

    integrated  shared with the system, as on a Jetson: CUDA's free memory then excludes the page cache,
                which the system reclaims on demand
    """

    free_mb: float
    total_mb: float
    integrated: bool


def read_gpu(device: str) -> GpuMemory | None:
    """Read the GPU's memory; None for a CPU."""
    if device == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return GpuMemory(free / 1e6, total / 1e6, bool(torch.cuda.get_device_properties(device).is_integrated))


def device_memory(board: BoardInfo, gpu: GpuMemory | None) -> DeviceMemory:
    """Return the device's memory.

    A CPU and an integrated GPU have the board's memory, of which MemAvailable is free.  Another GPU has its own.
    Raise FlowspecError if the board's memory is unknown.
    """
    if board.total_mb is None or board.available_mb is None:
        raise FlowspecError("/proc/meminfo does not state this machine's memory: devices must run Linux")
    separate = gpu is not None and not gpu.integrated
    total, free = (gpu.total_mb, gpu.free_mb) if gpu and separate else (board.total_mb, board.available_mb)
    return DeviceMemory(total, max(1.0, free - _MARGIN * total))


def used_mb(board: BoardInfo, gpu: GpuMemory | None) -> float:
    """Return the 10^6 bytes that all processes use, by the rule of :func:`device_memory`.

    Page cache counts as available.
    """
    if gpu and not gpu.integrated:
        return gpu.total_mb - gpu.free_mb
    return (board.total_mb or 0.0) - (board.available_mb or 0.0)


def read_rate(device: str, usable_mb: float) -> float:
    """Measure the 10^9 bytes read a second, by the faster of a large sum and a large copy."""
    count = int(min(_MOST_BYTES, usable_mb * 1e6 * _SHARE)) // 4
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    best = 0.0
    works: tuple[Callable[[], object], ...] = (source.sum, partial(target.copy_, source))
    for work in works:
        seconds = [seconds_of(work, device) for _ in range(_REPEATS)]
        best = max(best, 4 * count / trimmed_mean(seconds))
    del source, target, works, work
    if device != "cpu":
        torch.cuda.empty_cache()  # the stages to be measured need this memory
    return best / 1e9


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Time one run of ``work`` in seconds, completed on the device."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
