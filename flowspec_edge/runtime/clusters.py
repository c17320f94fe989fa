"""Clusters of processes, one at a time: the one that a request's strategy needs.

Knows that a pipeline and a tensor-parallel group cut the model differently, and that a board has no
memory for both.  Does not know how either is run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.runtime.emulation import Emulation
from flowspec_edge.runtime.local import Site
from flowspec_edge.runtime.processes import ProcessCluster
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.registry import strategy_class


class Clusters(ABC):
    """Implements ``runtime.request.Cluster``: starts the processes that a request needs, keeps them
    for the next one, and ends them before it starts others."""

    clock = "wall"

    def __init__(self) -> None:
        """Nothing is started yet."""
        self._cluster: ProcessCluster | None = None
        self._closed = False

    @abstractmethod
    def _start(self, parallelism: Parallelism) -> ProcessCluster:
        """A cluster whose devices share the model in this way."""

    @property
    def running(self) -> ProcessCluster | None:
        """The cluster that is up."""
        return self._cluster

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request on a cluster of the right kind; errors are those of ProcessCluster.

        After a cluster was lost the next request starts another.
        """
        return self._for(request.strategy).generate(request, on_tokens)

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
            self._end()
            running = self._cluster = self._start(wanted)
        return running

    def _end(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


class LocalClusters(Clusters):
    """Clusters whose processes are all on this machine."""

    def __init__(self, model_dir: Path, stages: int, dtype: str = "fp32", *, threads: int | None = None,
                 dead_after: float = 5.0, site: Site | None = None,
                 emulation: Emulation | None = None) -> None:
        """The arguments are those of :class:`ProcessCluster`."""
        super().__init__()
        self._model_dir = model_dir
        self._stages = stages
        self._dtype = dtype
        self._threads = threads
        self._dead_after = dead_after
        self._site = site
        self._emulation = emulation

    def __enter__(self) -> LocalClusters:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, parallelism: Parallelism) -> ProcessCluster:
        return ProcessCluster(
            self._model_dir, self._stages, self._dtype, parallelism=parallelism, threads=self._threads,
            dead_after=self._dead_after, site=self._site, emulation=self._emulation)
