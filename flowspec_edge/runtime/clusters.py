"""Clusters of processes, one at a time: the one that a request's strategy needs.

Knows that a pipeline and a tensor-parallel group cut the model differently, and that a board has no
memory for both.  Does not know how either is run.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.runtime.emulation import Emulation
from flowspec_edge.runtime.local import Site
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.processes import ProcessCluster
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.runtime.tickets import Ticket
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.registry import strategy_class

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Sharing(TypedDict, total=False):
    """How requests share a cluster, what becomes of them when a stage is lost, and who watches: arguments
    of :class:`ProcessCluster`, of which those that are left out have its defaults."""

    at_once: int
    cache_rows: int
    rejoin_within: float
    observer: Observer


class Clusters(ABC):
    """Implements ``runtime.request.SharedCluster``: starts the processes that a request needs, keeps
    them for the next one, and ends them before it starts others.

    :meth:`generate`, :meth:`submit` and :meth:`serve` are for one thread, the one that may start and end
    processes.
    """

    clock = "wall"

    def __init__(self) -> None:
        """Nothing is started yet."""
        self._cluster: ProcessCluster | None = None
        self._closed = False
        self._lost = False  # whether the newest cluster ended by itself, and no other is up yet

    @abstractmethod
    def _start(self, parallelism: Parallelism) -> ProcessCluster:
        """A cluster whose devices share the model in this way."""

    @property
    def running(self) -> ProcessCluster | None:
        """The cluster that is up."""
        return self._cluster

    @property
    def trouble(self) -> str | None:
        """What the cluster that is up has lost, and waits for; see SharedCluster."""
        running = self._cluster
        return running.trouble if running else None

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request on a cluster of the right kind; errors are those of ProcessCluster.

        After a cluster was lost the next request starts another.
        """
        return self._for(request.strategy).generate(request, on_tokens)

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> Ticket:
        """Hand a request in to a cluster of the right kind, which is started first if it is not up.

        UsageError for a request that wants another kind while others are open; else the errors are
        those of ProcessCluster.
        """
        return self._for(request.strategy).submit(request, on_tokens)

    def serve(self, stop: Callable[[], bool]) -> None:
        """Answer what was handed in to the cluster that is up; see ProcessCluster."""
        if self._cluster is None:
            raise FlowspecError("no cluster is up: hand a request in first")
        self._cluster.serve(stop)

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._closed = True
        self._end()

    def _for(self, strategy: str) -> ProcessCluster:
        if self._closed:
            raise FlowspecError("the clusters are closed; start new ones")
        wanted = strategy_class(strategy).parallelism
        running = self._cluster
        if running is None or running.closed or running.parallelism != wanted:
            if running is not None and not running.closed and running.busy:
                raise UsageError(f"strategy {strategy} needs devices that share the model in another way "
                                 "than those that are busy with other requests; ask again when they are done")
            self._lost |= running is not None and running.closed
            self._end()
            running = self._cluster = self._start(wanted)
            if self._lost:
                self._lost = False
                running.observer.back(time.monotonic())
        return running

    def _end(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


class LocalClusters(Clusters):
    """Clusters whose processes are all on this machine."""

    def __init__(self, model_dir: Path, stages: int, dtype: str = "fp32", *, device: str = "cpu",
                 threads: int | None = None, dead_after: float = 5.0, site: Site | None = None,
                 emulation: Emulation | None = None, **sharing: Unpack[Sharing]) -> None:
        """The arguments are those of :class:`ProcessCluster`."""
        super().__init__()
        self._model_dir = model_dir
        self._stages = stages
        self._dtype = dtype
        self._device = device
        self._threads = threads
        self._dead_after = dead_after
        self._site = site
        self._emulation = emulation
        self._sharing = sharing

    def __enter__(self) -> LocalClusters:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, parallelism: Parallelism) -> ProcessCluster:
        return ProcessCluster(
            self._model_dir, self._stages, self._dtype, device=self._device, parallelism=parallelism,
            threads=self._threads, dead_after=self._dead_after, site=self._site, emulation=self._emulation,
            **self._sharing)
