"""Work as CUDA graphs: one launch for all of its kernels, where that gives the same results in no more time.

A graph repeats its kernels on the memory that they had when it was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

Replay = Callable[[], object]
Made = TypeVar("Made")
Clock = Callable[[], float]

_TIMES = 5
_NOISE = 1.02  # times that differ by less are equal


class Recorder(Protocol):
    def __call__(self, work: Callable[[], Made]) -> tuple[Made, Replay]:
        """Run ``work``; return its result, and what repeats it: on the same memory, result included."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory; RuntimeError if a kernel forbids it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], Made]) -> tuple[Made, Replay]:
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # loads the kernels, which a capture must not
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream,
                              capture_error_mode="thread_local"):
            output = work()
        return output, graph.replay


@dataclass
class KernelChoice:
    """ms      by number of rows: (one by one, recorded), medians
    reason  why work is not recorded for some rows, or any; "" if it is for all
    """

    ms: dict[int, tuple[float, float]] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        times = ", ".join(f"{rows} rows {recorded:.1f} instead of {eager:.1f} ms"
                          for rows, (eager, recorded) in self.ms.items())
        return "; ".join(filter(None, (f"CUDA graphs: {times}" if times else "", self.reason)))


def compare(prepare: Callable[[bool, int], Callable[[], bytes]], clock: Clock = time.perf_counter
            ) -> tuple[tuple[float, float], str]:
    """``prepare(recorded, turn)`` returns the work of a turn, which returns its results' bytes.

    Returns median milliseconds (one by one, recorded), and why not to keep what is recorded, or "".
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    results: tuple[list[bytes], list[bytes]] = ([], [])
    for turn in range(_TIMES):
        for recorded in (False, True):
            run = prepare(recorded, turn)
            start = clock()
            results[recorded].append(run())
            seconds[recorded].append(clock() - start)
    eager, faster = (1e3 * median(turn_seconds) for turn_seconds in seconds)
    why = ("compute other results" if results[False] != results[True] else
           f"take {faster:.1f} instead of {eager:.1f} ms" if faster > eager * _NOISE else "")
    return (eager, faster), why
