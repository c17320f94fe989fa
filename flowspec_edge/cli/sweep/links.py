"""How a sweep opens clusters; torch and the runtime are imported only then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowspec_edge.bench.sweeps.runner import OpenPoint, PointCluster, profile_at, stages_at
from flowspec_edge.bench.sweeps.sweep import Axis, Links, Value
from flowspec_edge.cli.common.clusters import opened
from flowspec_edge.cli.common.options import Dtype, DtypeChoice, dtype_of
from flowspec_edge.device_profile import Profile
from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.runtime.cluster.spec import ClusterSpec, Here, Virtual

if TYPE_CHECKING:
    from flowspec_edge.bench.run.parallel import ParallelRun
    from flowspec_edge.fleet.inventory import Inventory
    from flowspec_edge.runtime.virtual.cluster import VirtualCluster

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepSetup:
    """What the axis does not change."""

    axis: Axis
    model: ModelDir
    stages: int
    profile: Profile
    dtype: DtypeChoice
    inventory: Inventory | None = None  # of real boards
    board_model: str = ""  # the model's directory on the boards
    device: str = "cpu"  # torch's, here
    idle_s: float = 0.0  # seconds before the first request, for the boards' idle power
    right_children: float = 1.0  # as ``VirtualCluster``'s

    @property
    def element_type(self) -> Dtype:
        return dtype_of(self.model, self.dtype)

    def spec(self, stages: int) -> ClusterSpec:
        return ClusterSpec(self.model.path, stages, self.element_type, device=self.device, idle_s=self.idle_s,
                           at_once=1)


def open_points(link_kind: Links, setup: SweepSetup) -> AbstractContextManager[OpenPoint]:
    """The returned context yields a function that opens the cluster of a value."""
    return _OPENERS[link_kind](setup)


@contextmanager
def _virtual(setup: SweepSetup) -> Iterator[OpenPoint]:
    """Points share the weights."""
    from flowspec_edge.runtime.cluster.clusters import open_cluster
    from flowspec_edge.util.torchdevice import memory_errors

    loaded: list[VirtualCluster] = []

    @contextmanager
    def open_point(value: Value) -> Iterator[PointCluster]:
        stages = stages_at(setup.stages, setup.axis, value)
        profile = profile_at(setup.profile, setup.axis, value)
        if loaded:
            loaded.append(loaded.pop().under(profile, stages))
        else:
            loaded.append(open_cluster(setup.spec(stages),
                                       Virtual(profile, right_children=setup.right_children)))
        yield PointCluster(loaded[0], None)

    with memory_errors(setup.device):
        yield open_point


@contextmanager
def _namespaces(setup: SweepSetup) -> Iterator[OpenPoint]:
    """Real processes that take the profile's time and send its bytes, over links that the kernel shapes."""
    from flowspec_edge.fleet.board_links.namespaces import NetnsTestbed, measure_links
    from flowspec_edge.runtime.emulation.durations import Emulation
    from flowspec_edge.runtime.virtual.devices import Devices

    with NetnsTestbed(setup.stages) as bed:

        @contextmanager
        def open_point(value: Value) -> Iterator[PointCluster]:
            assert not isinstance(value, tuple)
            bed.shape(value)
            given = [link.mbps for link in measure_links(bed)]
            profile = profile_at(setup.profile, setup.axis, value)
            emulation = Emulation(Devices.even(profile, setup.stages), "real")
            with opened(setup.spec(setup.stages), Here(bed, emulation)) as cluster:
                yield PointCluster(cluster, given)

        yield open_point


@contextmanager
def _cluster(setup: SweepSetup) -> Iterator[OpenPoint]:
    """Real boards in their own time; their kernels shape what they send."""
    from flowspec_edge.fleet.board_links.shaping import RemoteShaping
    from flowspec_edge.fleet.ssh_stages import SshBoards
    from flowspec_edge.runtime.observe.power import board_meter

    assert setup.inventory is not None
    inventory = setup.inventory
    with RemoteShaping(inventory) as shaping, board_meter() as meter:

        @contextmanager
        def open_point(value: Value) -> Iterator[PointCluster]:
            assert not isinstance(value, tuple)
            shaping.apply(value)
            links = shaping.measure()
            for link in links:
                if link.measure is None:
                    log.warning("%s to %s was not measured: %s", link.source, link.target, link.error)
            shaping.renew()
            place = SshBoards(inventory, setup.board_model, setup.element_type, shaping.renew)
            spec = replace(setup.spec(len(inventory.verify)), device=place.device, meter=meter)
            with opened(spec, place) as cluster:
                given = [link.measure.mbps for link in links if link.measure]
                yield PointCluster(cluster, given if len(given) == len(links) else None)

        yield open_point


def parallel_points(run: ParallelRun, setup: SweepSetup) -> OpenPoint:
    """Points in virtual time whose requests ``run`` computes."""
    @contextmanager
    def open_point(value: Value) -> Iterator[PointCluster]:
        yield PointCluster(run.cluster(stages_at(setup.stages, setup.axis, value),
                                       profile_at(setup.profile, setup.axis, value)), None)

    return open_point


_OPENERS: dict[Links, Callable[[SweepSetup], AbstractContextManager[OpenPoint]]] = {
    "virtual": _virtual, "namespaces": _namespaces, "cluster": _cluster}
