"""From options to a running cluster.

Knows whose time a run is in.  Imports torch and the runtime only when a cluster is wanted, so that
help and errors come at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowspec_edge.cli.cut import dtype_of
from flowspec_edge.cli.options import Clock, DtypeChoice
from flowspec_edge.config import Profile, load_profile
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.request import Cluster, SharedCluster

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flowspec_edge.fleet.inventory import Inventory
    from flowspec_edge.runtime.clusters import Sharing
    from flowspec_edge.runtime.local import Site
    from flowspec_edge.runtime.observer import Observer


@dataclass(frozen=True)
class Timing:
    """Whose time a run is in.

    profile  what virtual time charges, or what emulating processes take; None: this machine's own time
    links    while emulating: made up like the rest, or left to a real network
    """

    clock: Clock
    profile: Profile | None
    real_links: bool = False

    @property
    def emulated(self) -> bool:
        return self.clock == "wall" and self.profile is not None

    def processes(self, stages: int) -> int:
        """How many there are of a cluster of ``stages``, D0's among them."""
        return stages + 1 if self.clock == "wall" else 1


def timing(clock: Clock, profile: str, emulate: str | None) -> Timing:
    """From ``--clock``, ``--profile`` and ``--emulate``; UsageError for a profile that is not there."""
    described = load_profile(profile)  # also when time is real: a wrong name is worth an error
    if emulate is not None:
        return Timing("wall", load_profile(emulate))
    return Timing(clock, described if clock == "virtual" else None)


@contextmanager
def open_cluster(when: Timing, model: ModelDir, stages: int, dtype: DtypeChoice,
                 site: Site | None = None, observer: Observer | None = None, *, device: str = "cpu",
                 ) -> Iterator[Cluster]:
    """Processes (``wall``), started at ``site`` with the first request that needs them, or virtual
    time; closed on the way out.  ``observer`` is told what happens; ``device`` is torch's."""
    if when.clock == "wall":
        sharing: Sharing = {} if observer is None else {"observer": observer}
        with open_processes(when, model, stages, dtype, site, device=device, **sharing) as processes:
            yield processes
        return
    from flowspec_edge.runtime.virtual import VirtualCluster
    from flowspec_edge.torchdevice import memory_errors

    assert when.profile is not None
    with memory_errors(device):
        cluster = VirtualCluster(model.path, stages, when.profile, dtype_of(model, dtype), observer,
                                 device=device)
        try:
            yield cluster
        finally:
            cluster.close()


@contextmanager
def open_processes(when: Timing, model: ModelDir, stages: int, dtype: DtypeChoice, site: Site | None = None,
                   *, device: str = "cpu", **sharing: Unpack[Sharing]) -> Iterator[SharedCluster]:
    """Processes, started at ``site`` with the first request that needs them; all of them compute on the
    torch device ``device``."""
    from flowspec_edge.runtime.nursery import nursery

    if site is None and device == "cpu":
        nursery()  # it imports while we do
    from flowspec_edge.runtime.clusters import LocalClusters
    from flowspec_edge.runtime.devices import Devices
    from flowspec_edge.runtime.emulation import Emulation
    from flowspec_edge.torchdevice import memory_errors

    emulation = None
    if when.profile is not None:
        emulation = Emulation(Devices.even(when.profile, stages), "real" if when.real_links else "made")
    with memory_errors(device), LocalClusters(
            model.path, stages, dtype_of(model, dtype), device=device, site=site, emulation=emulation,
            **sharing) as clusters:
        yield clusters


@contextmanager
def open_boards(inventory: Inventory, model: ModelDir, board_model: str | None, dtype: DtypeChoice,
                **sharing: Unpack[Sharing]) -> Iterator[SharedCluster]:
    """The boards of a cluster, started over ssh with the first request; this machine is D0.

    ``board_model``: where they have the model; None: at the same path as here.
    """
    from flowspec_edge.fleet.remote_clusters import RemoteClusters

    clusters = RemoteClusters(inventory, model.path, board_model or str(model.path.resolve()),
                              dtype_of(model, dtype), **sharing)
    try:
        yield clusters
    finally:
        clusters.close()
