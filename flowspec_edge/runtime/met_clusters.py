"""A cluster whose stages are services of their own: D0 meets them, and never starts nor ends them.

Knows where they are, and what the service manager is told of D0's side meanwhile.  Does not know what
is asked of the cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flowspec_edge.errors import UsageError
from flowspec_edge.runtime.clusters import Clusters, Sharing
from flowspec_edge.runtime.draftconfig import DraftConfig
from flowspec_edge.runtime.local import Addresses
from flowspec_edge.runtime.notify import Notifier
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.processes import ProcessCluster
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.transport import keys

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MetClusters(Clusters):
    """The stages of a draft device's configuration, one pipeline for as long as this lives."""

    def __init__(self, config: DraftConfig, notifier: Notifier, **sharing: Unpack[Sharing]) -> None:
        """Nobody is met yet.  UsageError for a public key that is none.

        notifier  hears of D0's life from the thread that drives the cluster, and who is waited for
        """
        super().__init__()
        self._config = config
        self._notifier = notifier
        self._sharing = sharing
        self._addresses = Addresses(
            control=config.control, output=config.output, first=config.first, instances=config.instances,
            key_file=Path(config.key_file) if config.key_file else None,
            worker_keys=[keys.parse_public(key) for key in config.worker_keys],
            unencrypted=config.unencrypted, digests=config.digests)

    def __enter__(self) -> MetClusters:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, parallelism: Parallelism) -> ProcessCluster:
        config = self._config
        if parallelism != "pipeline":
            raise UsageError(f"the stages of {config.cluster} are services that make up a pipeline, and no "
                             f"{parallelism} group")
        self._notifier.alive()
        if config.threads:
            torch.set_num_threads(config.threads)
        return ProcessCluster(
            Path(config.model), len(config.instances), config.dtype, device=config.device,
            addresses=self._addresses, start_within=config.start_within_s, watch=self._watch,
            waiting=self._waiting, **self._sharing)

    def _watch(self) -> None:
        """Of a stage's end nobody here can tell.  But whoever drives the cluster asks several times a
        second, be it busy, idle or waiting for a stage that is lost: it is not stuck."""
        self._notifier.alive()

    def _waiting(self, stages: list[str]) -> None:
        self._notifier.status(f"waiting for {', '.join(stages)}")


class Losses(Observer):
    """Tells the service manager which stage is lost, and when all are back."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier

    def lost(self, reason: str, at: float) -> None:
        """See :class:`Observer`."""
        self._notifier.status(f"mending: {reason}")

    def back(self, at: float) -> None:
        """See :class:`Observer`."""
        self._notifier.status("all stages are back")
