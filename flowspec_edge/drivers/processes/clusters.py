"""Opens clusters: simulated ones, and clusters of processes, which start with the first request.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch

from flowspec_edge.d0.config import DraftConfig
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import (
    ClusterState,
    ClusterStatus,
    OnTokens,
    Request,
    RequestHandle,
    Result,
)
from flowspec_edge.drivers.processes.addresses import Addresses
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import (
    BoardStages,
    ClusterSpec,
    Connected,
    Here,
    Place,
    Processes,
    Virtual,
)
from flowspec_edge.drivers.stage.sd_notify import Notifier
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import FlowspecError
from flowspec_edge.strategies.registry import require_pipelines
from flowspec_edge.transport import keys

if TYPE_CHECKING:
    from typing_extensions import Self


@overload
def open_cluster(spec: ClusterSpec, place: Processes = ...) -> OnDemandCluster: ...
@overload
def open_cluster(spec: ClusterSpec, place: Virtual) -> VirtualCluster: ...
@overload
def open_cluster(spec: ClusterSpec, place: Place) -> OnDemandCluster | VirtualCluster: ...
def open_cluster(spec: ClusterSpec, place: Place = Here()) -> OnDemandCluster | VirtualCluster:  # noqa: B008
    """Return a cluster, which the caller closes. Processes start with the first request, so errors of their
    start are raised there. A virtual cluster loads the model at once and raises as ``VirtualCluster``."""
    if not isinstance(place, Virtual):
        return OnDemandCluster(spec, place)
    return VirtualCluster(spec.model, spec.stages, place.profile, spec.dtype, spec.observer,
                          device=spec.device, learn=place.learn, scheduling_policy=spec.scheduling_policy,
                          right_children=place.right_children)


class OnDemandCluster:
    """Starts the processes with the first request, and again after a loss. Only one thread
    may call :meth:`generate`, :meth:`submit` and :meth:`serve`, because they start processes."""

    clock = "wall"

    def __init__(self, spec: ClusterSpec, place: Processes = Here()) -> None:  # noqa: B008
        self._spec, self._place = spec, place
        self._cluster: ProcessCluster | None = None
        self._closed = False
        self._lost = False  # whether the last cluster ended by itself and no other has started yet

    @property
    def running(self) -> ProcessCluster | None:
        return self._cluster

    @property
    def status(self) -> ClusterStatus:
        running = self._cluster
        return running.status if running else ClusterStatus(ClusterState.STOPPED)

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request, on a new cluster after a loss; raises the errors of ProcessCluster."""
        return self._for(request).generate(request, on_tokens)

    def generate_many(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None
                      ) -> list[Result]:
        """As ``d0.request.ClusterBackend``. A request that is due is submitted between two steps of the
        event loop, so on an idle cluster up to 20 ms late."""
        if not requests:
            return []
        cluster = self._for(*requests)
        began = time.monotonic()
        due = arrivals or [0.0] * len(requests)
        waiting = deque(sorted((at, place) for place, at in enumerate(due)))
        handles: dict[int, RequestHandle] = {}

        def done() -> bool:
            while waiting and waiting[0][0] <= time.monotonic() - began:
                place = waiting.popleft()[1]
                handles[place] = cluster.submit(requests[place])
            return not waiting and all(handle.done() for handle in handles.values())

        cluster.serve(done)
        results = [handles[place].result() for place in range(len(requests))]
        return [replace(result, token_at=tuple(at - began for at in result.token_at)) for result in results]

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        """Queue a request, and start the processes if none run."""
        return self._for(request).submit(request, on_tokens)

    def serve(self, stop: Callable[[], bool]) -> None:
        if self._cluster is None:
            raise FlowspecError("no cluster is up: submit a request first")
        self._cluster.serve(stop)

    def close(self) -> None:
        self._closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _for(self, *requests: Request) -> ProcessCluster:
        if self._closed:
            raise FlowspecError("the clusters are closed; start new ones")
        require_pipelines(request.strategy for request in requests)
        if isinstance(self._place, BoardStages):
            self._place.refresh()
        running = self._cluster
        if running is None or running.closed:
            self._lost |= running is not None and running.closed
            running = None  # else this reference would keep the old cluster's memory while the next starts
            self._end()
            running = self._cluster = self._start()
            if self._lost:
                self._lost = False
                running.observer.recovered(time.monotonic())
        return running

    def _start(self) -> ProcessCluster:
        place = self._place
        return ProcessCluster(self._spec, place.connect() if isinstance(place, BoardStages) else place)

    def _end(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
            gc.collect()  # frees the cluster's reference cycles before the next one loads D0's models again
        if isinstance(self._place, BoardStages):
            self._place.disconnect()


class Services:
    """``spec.BoardStages`` that are services: D0 connects to them, but neither starts nor ends them."""

    def __init__(self, config: DraftConfig, notifier: Notifier) -> None:
        """``notifier`` gets keep-alives from the driving thread and the names of missing stages. UsageError
        for an invalid public key."""
        self._config = config
        self._notifier = notifier
        self._addresses = Addresses(
            control=config.control, output=config.output, first=config.first, instances=config.instances,
            key_file=Path(config.key_file) if config.key_file else None, public_key=config.public_key,
            worker_keys=[keys.parse_public(key) for key in config.worker_keys],
            unencrypted=config.unencrypted, digests=config.digests)

    @property
    def spec(self) -> ClusterSpec:
        """D0's part of the configuration."""
        config = self._config
        return ClusterSpec(Path(config.model), len(config.instances), config.dtype, device=config.device,
                           start_within=config.start_within_s, slow=self._notifier.slow)

    def connect(self) -> Connected:
        self._notifier.alive()
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        return Connected(self._addresses, self._watch, self._waiting)

    def refresh(self) -> None:
        """Services need no preparation for a request."""

    def disconnect(self) -> None:
        """Services stay up."""

    def _watch(self) -> None:
        """Send a keep-alive. The driving thread calls this method several times a second."""
        self._notifier.alive()

    def _waiting(self, stages: list[str]) -> None:
        self._notifier.status(f"waiting for {', '.join(stages)}")


class OutageStatus(Observer):
    """Reports lost stages, and their return, to the service manager."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier

    def lost(self, reason: str, at: float) -> None:
        self._notifier.status(f"recovering: {reason}")

    def recovered(self, at: float) -> None:
        self._notifier.status("all stages are back")
