"""The ways by which a cluster takes on a value of an axis, one function each.

A way turns a value into a running cluster; what it keeps from value to value it gives back when the
sweep ends.  torch and the runtime are imported only when a cluster is wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowspec_edge.bench.sweep import Axis, Links, Value
from flowspec_edge.bench.sweep_runner import OpenPoint, PointCluster, profile_at, stages_at
from flowspec_edge.cli.clusters import Timing, open_cluster
from flowspec_edge.cli.cut import dtype_of
from flowspec_edge.cli.options import DtypeChoice
from flowspec_edge.config import Profile
from flowspec_edge.modeldir import ModelDir

if TYPE_CHECKING:
    from flowspec_edge.fleet.inventory import Inventory
    from flowspec_edge.runtime.virtual import VirtualCluster


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What a cluster is like before the axis changes it."""

    axis: Axis
    model: ModelDir
    stages: int
    profile: Profile
    dtype: DtypeChoice
    inventory: Inventory | None = None  # of a real cluster
    board_model: str = ""  # where its boards have the model
    device: str = "cpu"  # torch's, here


def open_points(way: Links, setup: Setup) -> AbstractContextManager[OpenPoint]:
    """How this way opens a point, for as long as the sweep lasts."""
    return _WAYS[way](setup)


@contextmanager
def _virtual(setup: Setup) -> Iterator[OpenPoint]:
    """Virtual time under the profile with the point's link; all points share the weights."""
    from flowspec_edge.runtime.virtual import VirtualCluster
    from flowspec_edge.torchdevice import memory_errors

    loaded: list[VirtualCluster] = []

    @contextmanager
    def open_point(value: Value) -> Iterator[PointCluster]:
        stages = stages_at(setup.stages, setup.axis, value)
        profile = profile_at(setup.profile, setup.axis, value)
        if loaded:
            loaded.append(loaded.pop().under(profile, stages))
        else:
            loaded.append(VirtualCluster(setup.model.path, stages, profile,
                                         dtype_of(setup.model, setup.dtype), device=setup.device))
        yield PointCluster(loaded[0], None)

    with memory_errors(setup.device):
        yield open_point


@contextmanager
def _namespaces(setup: Setup) -> Iterator[OpenPoint]:
    """Real processes that take the profile's time, each in a network namespace of its own, and
    messages of the profile's bytes over links that the kernel makes as slow as the point says."""
    from flowspec_edge.fleet.bedtest import measure_bed
    from flowspec_edge.fleet.netbed import NetBed

    with NetBed(setup.stages) as bed:

        @contextmanager
        def open_point(value: Value) -> Iterator[PointCluster]:
            assert not isinstance(value, tuple)
            bed.shape(value)
            given = [link.mbps for link in measure_bed(bed)]
            when = Timing("wall", profile_at(setup.profile, setup.axis, value), real_links=True)
            with open_cluster(when, setup.model, setup.stages, setup.dtype, bed,
                              device=setup.device) as cluster:
                yield PointCluster(cluster, given)

        yield open_point


@contextmanager
def _cluster(setup: Setup) -> Iterator[OpenPoint]:
    """The boards of a real cluster, in their own time, what they send slowed down by their kernels."""
    from flowspec_edge.fleet.remote import RemoteShaping
    from flowspec_edge.fleet.remote_clusters import RemoteClusters

    assert setup.inventory is not None
    inventory = setup.inventory
    with RemoteShaping(inventory) as shaping:

        @contextmanager
        def open_point(value: Value) -> Iterator[PointCluster]:
            assert not isinstance(value, tuple)
            shaping.apply(value)
            links = shaping.measure()
            for link in links:
                if link.measure is None:
                    log.warning("%s to %s was not measured: %s", link.source, link.target, link.error)
            shaping.renew()
            clusters = RemoteClusters(inventory, setup.model.path, setup.board_model,
                                      dtype_of(setup.model, setup.dtype), shaping.renew)
            try:
                given = [link.measure.mbps for link in links if link.measure]
                yield PointCluster(clusters, given if len(given) == len(links) else None)
            finally:
                clusters.close()

        yield open_point


_WAYS: dict[Links, Callable[[Setup], AbstractContextManager[OpenPoint]]] = {
    "virtual": _virtual, "namespaces": _namespaces, "cluster": _cluster}
