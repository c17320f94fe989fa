"""From options to a running cluster; torch is imported only to open one, so help and errors are fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowspec_edge.cli.common.defaults import dtype_of
from flowspec_edge.cli.common.options import Clock, DtypeChoice
from flowspec_edge.model.modeldir import ModelDir

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flowspec_edge.config import Profile
    from flowspec_edge.fleet.inventory import Inventory
    from flowspec_edge.runtime.cluster.addresses import Placement
    from flowspec_edge.runtime.cluster.clusters import SharingOptions
    from flowspec_edge.runtime.observe.observer import Observer
    from flowspec_edge.runtime.request import ClusterBackend, SharedCluster


@dataclass(frozen=True)
class ClockSettings:
    """``profile`` None: this machine's own time; ``real_links``: emulation over a real network;
    ``right_children``: as ``VirtualCluster``'s."""

    clock: Clock
    profile: Profile | None
    real_links: bool = False
    right_children: float = 1.0

    @property
    def emulated(self) -> bool:
        return self.clock == "wall" and self.profile is not None

    @property
    def profile_name(self) -> str | None:
        return self.profile.name if self.profile else None

    def processes(self, stages: int) -> int:
        """D0's included."""
        return stages + 1 if self.clock == "wall" else 1


def choose_clock(clock: Clock, profile: str, emulate: str | None) -> ClockSettings:
    """UsageError for an unknown profile."""
    from flowspec_edge.config import load_profile  # pydantic takes a while

    described = load_profile(profile)  # in real time, too: a wrong name is an error
    if emulate is not None:
        return ClockSettings("wall", load_profile(emulate))
    return ClockSettings(clock, described if clock == "virtual" else None)


@contextmanager
def open_cluster(clock_settings: ClockSettings, model: ModelDir, stages: int, dtype: DtypeChoice,
                 placement: Placement | None = None, observer: Observer | None = None, *, device: str = "cpu",
                 idle_s: float = 0.0, at_once: int = 1) -> Iterator[ClusterBackend]:
    """Processes (``wall``), started with the first request, or virtual time; ``device`` is torch's;
    ``at_once``: concurrent requests that the processes must accept."""
    if clock_settings.clock == "wall":
        sharing: SharingOptions = {"idle_s": idle_s, "at_once": at_once}
        if observer is not None:
            sharing["observer"] = observer
        with open_processes(clock_settings, model, stages, dtype, placement, device=device,
                            **sharing) as processes:
            yield processes
        return
    from flowspec_edge.runtime.virtual.cluster import VirtualCluster
    from flowspec_edge.util.device_memory import memory_errors

    assert clock_settings.profile is not None
    with memory_errors(device):
        cluster = VirtualCluster(model.path, stages, clock_settings.profile, dtype_of(model, dtype), observer,
                                 device=device, right_children=clock_settings.right_children)
        try:
            yield cluster
        finally:
            cluster.close()


@contextmanager
def open_processes(clock_settings: ClockSettings, model: ModelDir, stages: int, dtype: DtypeChoice,
                   placement: Placement | None = None, *, device: str = "cpu",
                   **sharing: Unpack[SharingOptions]) -> Iterator[SharedCluster]:
    """Started with the first request; all compute on torch's ``device``."""
    from flowspec_edge.runtime.cluster.forkserver import preload

    if placement is None and device == "cpu":
        preload()  # it imports torch while this process does
    from flowspec_edge.runtime.cluster.clusters import LocalCluster
    from flowspec_edge.runtime.emulation.engine import Emulation
    from flowspec_edge.runtime.virtual.devices import Devices
    from flowspec_edge.util.device_memory import memory_errors

    emulation = None
    if clock_settings.profile is not None:
        emulation = Emulation(Devices.even(clock_settings.profile, stages),
                              "real" if clock_settings.real_links else "made")
    with (memory_errors(device), _metered(sharing, emulation is None),
          LocalCluster(model.path, stages, dtype_of(model, dtype), device=device, placement=placement,
                       emulation=emulation, **sharing) as clusters):
        yield clusters


@contextmanager
def open_boards(inventory: Inventory, model: ModelDir, board_model: str | None, dtype: DtypeChoice,
                **sharing: Unpack[SharingOptions]) -> Iterator[SharedCluster]:
    """Boards, started over ssh with the first request; this machine is D0.  ``board_model``: the model's
    directory on the boards; None: the same path as here."""
    from flowspec_edge.fleet.remote_cluster import SshClusters

    with _metered(sharing):
        clusters = SshClusters(inventory, model.path, board_model or str(model.path.resolve()),
                               dtype_of(model, dtype), **sharing)
        try:
            yield clusters
        finally:
            clusters.close()


@contextmanager
def _metered(sharing: SharingOptions, wanted: bool = True) -> Iterator[None]:
    """Add this board's power meter to ``sharing``, unless the key exists."""
    from flowspec_edge.runtime.observe.power import board_meter

    with board_meter(wanted and "meter" not in sharing) as meter:
        sharing.setdefault("meter", meter)
        yield
