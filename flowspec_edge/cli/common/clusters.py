"""From options to a running cluster; torch is imported only to open one, so help and errors are fast."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, cast

from flowspec_edge.cli.common.options import Clock, DtypeChoice, dtype_of
from flowspec_edge.model.modeldir import ModelDir

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flowspec_edge.config import Profile
    from flowspec_edge.fleet.inventory import Inventory
    from flowspec_edge.runtime.cluster.addresses import Placement
    from flowspec_edge.runtime.cluster.clusters import SharingOptions
    from flowspec_edge.runtime.observe.observer import Observer
    from flowspec_edge.runtime.request import ClusterBackend, OnTokens, Request, Result, SharedCluster


INTERRUPTED = 130  # exit code: 128 + SIGINT, the shells' convention


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
        """On a GPU, D0's included, which the only stage shares."""
        return stages + 1 if self.clock == "wall" and stages > 1 else 1


def choose_clock(clock: Clock, profile: str, emulate: str | None) -> ClockSettings:
    """UsageError for an unknown profile."""
    from flowspec_edge.fleet.planning.testbed import profile_or_testbed  # pydantic takes a while

    described = profile_or_testbed(profile)  # in real time, too: a wrong name is an error
    if emulate is not None:
        return ClockSettings("wall", profile_or_testbed(emulate))
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
    from flowspec_edge.util.torchdevice import memory_errors

    assert clock_settings.profile is not None
    with memory_errors(device):
        cluster = VirtualCluster(model.path, stages, clock_settings.profile, dtype_of(model, dtype), observer,
                                 device=device, right_children=clock_settings.right_children)
        try:
            yield cluster
        finally:
            cluster.close()


def answer(cluster: ClusterBackend, request: Request, on_tokens: OnTokens) -> Result:
    """The request's result.  The first Ctrl-C after a token cancels it, which ends it within a turn or two;
    any other raises KeyboardInterrupt."""
    begun = stopped = False

    def on_new_tokens(tokens: list[int]) -> None:
        nonlocal begun
        begun = True
        on_tokens(tokens)

    def stop() -> None:
        nonlocal stopped
        stopped = True

    with first_interrupt(stop, lambda: begun):
        if cluster.clock == "virtual":
            from flowspec_edge.runtime.virtual.cluster import VirtualCluster

            assert isinstance(cluster, VirtualCluster)
            return cluster.generate_many([request], on_tokens=[on_new_tokens], stop=lambda: stopped)[0]
        processes = cast("SharedCluster", cluster)
        handle = processes.submit(request, on_new_tokens)

        def done() -> bool:
            if stopped:
                handle.cancel()
            return handle.done()

        processes.serve(done)
        return handle.result()


@contextmanager
def first_interrupt(stop: Callable[[], object], wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """The first Ctrl-C within the block calls ``stop`` if ``wanted()``; any other is as before the block."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # a background job of a shell ignores it
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        if wanted():
            stop()
        else:
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
    from flowspec_edge.util.torchdevice import memory_errors

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
