"""Opens clusters; and the stages of a draft device's service, which systemd starts."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar, overload

import torch

from flowspec_edge.d0.config import DraftConfig
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.run_events import RunEvent, StagesBack, StagesLost
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import BoardStages, ClusterSpec, Connected, ExecutionBackend, Here, Processes
from flowspec_edge.drivers.ring import Addresses
from flowspec_edge.drivers.stage.sd_notify import Notifier
from flowspec_edge.transport import keys

C = TypeVar("C")


@overload
def open_cluster(spec: ClusterSpec, backend: Processes = ...) -> ProcessCluster: ...
@overload
def open_cluster(spec: ClusterSpec, backend: ExecutionBackend[C]) -> C: ...
def open_cluster(spec: ClusterSpec, backend: Processes | ExecutionBackend[C] = Here()  # noqa: B008
                 ) -> ProcessCluster | C:
    """Return a cluster, which the caller closes.

    Processes start with the first request, so errors of their start are raised there. A virtual cluster loads the
    model at once and raises as ``VirtualCluster``.
    """
    if isinstance(backend, Here | Connected | BoardStages):
        return ProcessCluster(spec, backend)
    return backend.open(spec)


class Services:
    """Stages (``spec.BoardStages``) that are services: D0 connects to them, but neither starts nor ends them."""

    def __init__(self, config: DraftConfig, notifier: Notifier) -> None:
        """Read the public keys; UsageError for an invalid one.

        ``notifier`` gets keep-alives from the driving thread and the names of missing stages.
        """
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
        """Do nothing: services need no preparation for a request."""

    def disconnect(self) -> None:
        """Leave the services running."""

    def _watch(self) -> None:
        """Send a keep-alive. The driving thread calls this method several times a second."""
        self._notifier.alive()

    def _waiting(self, stages: list[str]) -> None:
        self._notifier.status(f"waiting for {', '.join(stages)}")


class OutageStatus(Observer):
    """Reports lost stages, and their return, to the service manager."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier

    def observe(self, event: RunEvent) -> None:
        match event:
            case StagesLost(reason=reason):
                self._notifier.status(f"recovering: {reason}")
            case StagesBack():
                self._notifier.status("all stages are back")
