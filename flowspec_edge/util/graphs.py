"""Work as CUDA graphs: one launch for all of its kernels, where that gives the same results in no more time.

A graph repeats its kernels on the memory that they had when it was recorded.  So what is recorded reads its inputs in
fixed places (:func:`load`), for one of a few numbers of rows (:func:`choose`).  What is recorded is said elsewhere: of
a stage the pieces between attention, whose caches begin anywhere (``stage.layer_graphs``), of a draft model whole
passes (``drafting.recorded``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.errors import first_line

Replay = Callable[[], object]
Graph = TypeVar("Graph")
Clock = Callable[[], float]

TIMED_TURNS = 5
_NOISE = 1.02  # times that differ by less are equal


class Recorder(Protocol):
    def __call__(self, work: Callable[[], Graph]) -> tuple[Graph, Replay]:
        """Run ``work``; return its result, and what repeats it: on the same memory, result included."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory; RuntimeError if a kernel forbids it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], Graph]) -> tuple[Graph, Replay]:
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
    """Whether work is recorded as graphs, and why.

    ms      by number of rows: (kernel by kernel, recorded), medians
    reason  why work is not recorded for some rows, or any; "" if it is for all
    """

    ms: dict[int, tuple[float, float]] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        times = ", ".join(f"{rows} rows {recorded:.1f} instead of {eager:.1f} ms"
                          for rows, (eager, recorded) in self.ms.items())
        return "; ".join(filter(None, (f"CUDA graphs: {times}" if times else "", self.reason)))


def load(target: Tensor, values: Tensor | NDArray[np.generic]) -> None:
    """Copy ``values`` to a fixed place; from host memory without waiting for the device's queue."""
    source = values if isinstance(values, Tensor) else torch.from_numpy(values)
    pinned = target.device.type == "cuda" and source.device.type == "cpu"
    target.copy_(source.pin_memory() if pinned else source, non_blocking=True)


def choose(title: str, sizes: Iterable[int], record: Callable[[int], Graph],
           prepare: Callable[[int, Graph, bool, int], Callable[[], bytes]], clock: Clock = time.perf_counter,
           untimed: int = 0) -> tuple[dict[int, Graph], KernelChoice]:
    """Record ``title`` for each number of rows, and keep what computes the same bits in no more time.

    record   makes it for so many rows
    prepare  returns the work of a turn, by the rows, the graph, whether it runs as recorded, and the turn's number;
             the work returns its results' bytes
    untimed  turns after the first ``TIMED_TURNS``, in which only bits are compared

    Nothing is kept after a failure: it all runs kernel by kernel as well.
    """
    graphs: dict[int, Graph] = {}
    choice = KernelChoice()
    try:
        for rows in sizes:
            graph = record(rows)
            times, why = _compare(partial(prepare, rows, graph), clock, untimed)
            if why:
                choice.reason = f"{title} of {rows} rows run kernel by kernel: recorded {title} {why}"
            else:
                graphs[rows], choice.ms[rows] = graph, times
    except Exception as error:  # of PyTorch, the driver, a kernel
        return {}, KernelChoice(reason=f"{title} run kernel by kernel: they cannot be recorded: {first_line(error)}")
    return graphs, choice


def _compare(prepare: Callable[[bool, int], Callable[[], bytes]], clock: Clock, untimed: int
             ) -> tuple[tuple[float, float], str]:
    """Median milliseconds (kernel by kernel, recorded), and why not to keep what is recorded, or ""."""
    seconds: tuple[list[float], list[float]] = ([], [])
    results: tuple[list[bytes], list[bytes]] = ([], [])
    for turn in range(TIMED_TURNS + untimed):
        for recorded in (False, True):
            run = prepare(recorded, turn)
            start = clock()
            results[recorded].append(run())
            seconds[recorded].append(clock() - start)
    eager, faster = (1e3 * median(turns[:TIMED_TURNS]) for turns in seconds)
    why = ("compute other results" if results[False] != results[True] else
           f"take {faster:.1f} instead of {eager:.1f} ms" if faster > eager * _NOISE else "")
    return (eager, faster), why
