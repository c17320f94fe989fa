"""How a measurement opens its cluster, at each value of an axis.

Torch and the drivers are imported only then.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowspec_edge.cli.bench.options import BenchOptions
from flowspec_edge.cli.bench.subject import BenchSubject
from flowspec_edge.cli.common.clusters import ClockSettings, local_processes
from flowspec_edge.device_profile import Profile
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.place import Virtual
from flowspec_edge.lab.bench.axes import Axis, Value
from flowspec_edge.lab.bench.results import Links
from flowspec_edge.lab.bench.runner import OpenPoint, PointCluster
from flowspec_edge.util.threads import share_of_cores

if TYPE_CHECKING:
    from flowspec_edge.boards.inventory import Inventory
    from flowspec_edge.drivers.virtual.cluster import VirtualCluster
    from flowspec_edge.lab.bench.parallel import ParallelRun

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterSetup:
    """What an axis does not change.

    options      with definite stages, dtype and device
    at_once      concurrent requests
    board_model  the model's directory on the boards of ``inventory``
    """

    axis: Axis | None
    subject: BenchSubject
    options: BenchOptions
    clock: ClockSettings
    at_once: int = 1
    inventory: Inventory | None = None
    board_model: str = ""

    def described(self, value: Value | None) -> tuple[int, Profile, float]:
        """Return stages, devices and ``VirtualCluster``'s ``right_children`` at a value; for clocks with a profile."""
        stages, profile, share = self.options.stages, self.clock.profile, self.clock.right_children
        assert profile is not None
        if self.axis is None or value is None:
            return stages, profile, share
        return (self.axis.stages(stages, value), self.axis.profile(profile, value),
                self.axis.acceptance(share, value))

    @property
    def spec(self) -> ClusterSpec:
        o = self.options
        return ClusterSpec(self.subject.path, o.stages, self.subject.dtype(o.dtype), device=o.device,
                           at_once=self.at_once, idle_s=o.idle_seconds)


def open_points(links: Links, setup: ClusterSetup) -> AbstractContextManager[OpenPoint]:
    """Return a context that yields a function that opens the cluster of a value."""
    if links == "virtual" and setup.clock.clock == "wall":
        return _processes(setup)
    return _OPENERS[links](setup)


@contextmanager
def _processes(setup: ClusterSetup) -> Iterator[OpenPoint]:
    from flowspec_edge.drivers.processes.clusters import open_cluster

    o = setup.options

    @contextmanager
    def open_point(value: Value | None) -> Iterator[PointCluster]:
        with open_cluster(setup.spec, local_processes(o.stages, o.device, setup.clock.profile)) as cluster:
            yield PointCluster(cluster, None)

    yield open_point


@contextmanager
def _virtual(setup: ClusterSetup) -> Iterator[OpenPoint]:
    """Open clusters whose points share the weights."""
    loaded: list[VirtualCluster] = []

    @contextmanager
    def open_point(value: Value | None) -> Iterator[PointCluster]:
        stages, profile, share = setup.described(value)
        if loaded:
            loaded.append(loaded.pop().under(profile, stages, share))
        else:
            backend = Virtual(profile, right_children=share, recording=setup.subject.recording)
            loaded.append(backend.open(replace(setup.spec, stages=stages)))
        yield PointCluster(loaded[0], None)

    yield open_point
    if loaded and (note := loaded[0].note()):
        print(f"flowspec: {note}", file=sys.stderr)


@contextmanager
def _namespaces(setup: ClusterSetup) -> Iterator[OpenPoint]:
    """Open real processes that take the profile's time and send its bytes, over links that the kernel shapes."""
    from flowspec_edge.drivers.processes.clusters import open_cluster
    from flowspec_edge.drivers.virtual.devices import Devices
    from flowspec_edge.lab.emulation.emulator import emulated
    from flowspec_edge.lab.links.namespaces import NetnsTestbed, measure_links

    with NetnsTestbed(setup.options.stages) as bed:

        @contextmanager
        def open_point(value: Value | None) -> Iterator[PointCluster]:
            bed.shape(_mbps(value))
            measured_mbps = [link.mbps for link in measure_links(bed)]
            devices = Devices.from_profile(setup.described(value)[1], setup.options.stages)
            with open_cluster(setup.spec, emulated(devices, "real", bed)) as cluster:
                yield PointCluster(cluster, measured_mbps)

        yield open_point


@contextmanager
def _cluster(setup: ClusterSetup) -> Iterator[OpenPoint]:
    """Open real boards in their own time.

    On the axis "bandwidth" their kernels shape what they send.
    """
    with _shaped_boards(setup) if setup.axis and setup.axis.link else _boards(setup) as open_point:
        yield open_point


@contextmanager
def _boards(setup: ClusterSetup) -> Iterator[OpenPoint]:
    """Open one cluster for all values, which change what D0 does alone: no board loads its shard again."""
    from flowspec_edge.boards.ssh_stages import SshBoards
    from flowspec_edge.drivers.processes.clusters import open_cluster

    assert setup.inventory is not None
    backend = SshBoards(setup.inventory, setup.board_model, setup.subject.dtype(setup.options.dtype))
    with open_cluster(replace(setup.spec, device=backend.device), backend) as cluster:

        @contextmanager
        def open_point(value: Value | None) -> Iterator[PointCluster]:
            yield PointCluster(cluster, None)

        yield open_point


@contextmanager
def _shaped_boards(setup: ClusterSetup) -> Iterator[OpenPoint]:
    from flowspec_edge.boards.ssh_stages import SshBoards
    from flowspec_edge.drivers.processes.clusters import open_cluster
    from flowspec_edge.lab.links.shaping import RemoteShaping

    assert setup.inventory is not None
    inventory = setup.inventory
    with RemoteShaping(inventory) as shaping:

        @contextmanager
        def open_point(value: Value | None) -> Iterator[PointCluster]:
            shaping.apply(_mbps(value))
            links = shaping.measure()
            for link in links:
                if link.measure is None:
                    log.warning("%s to %s was not measured: %s", link.source, link.target, link.error)
            shaping.renew()
            backend = SshBoards(inventory, setup.board_model, setup.subject.dtype(setup.options.dtype),
                                shaping.renew)
            with open_cluster(replace(setup.spec, device=backend.device), backend) as cluster:
                measured_mbps = [link.measure.mbps for link in links if link.measure]
                yield PointCluster(cluster, measured_mbps if len(measured_mbps) == len(links) else None)

        yield open_point


def parallel_points(setup: ClusterSetup, names: Sequence[str]) -> tuple[ParallelRun, OpenPoint]:
    """Return processes of --jobs, or Dask's, and points in virtual time whose requests they compute."""
    from flowspec_edge.lab.bench.parallel import ParallelRun, Workplace, plugins_of

    o = setup.options
    threads = 0 if o.dask else share_of_cores(o.processes)
    run = ParallelRun(Workplace(setup.subject.path.resolve(), setup.subject.dtype(o.dtype), o.device,
                                plugins_of(names), threads, o.recording is not None), o.processes, o.dask)

    @contextmanager
    def open_point(value: Value | None) -> Iterator[PointCluster]:
        yield PointCluster(run.cluster(*setup.described(value)), None)

    return run, open_point


def _mbps(value: Value | None) -> float:
    assert isinstance(value, int | float)
    return value


_OPENERS: dict[Links, Callable[[ClusterSetup], AbstractContextManager[OpenPoint]]] = {
    "virtual": _virtual, "namespaces": _namespaces, "cluster": _cluster}
