"""From options to a running cluster; torch is imported only to open one, so help and errors are fast."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, cast

from flowspec_edge.cli.common.options import Clock
from flowspec_edge.drivers.processes.spec import Here

if TYPE_CHECKING:
    from flowspec_edge.d0.request import ClusterBackend, OnTokens, Request, Result
    from flowspec_edge.d0.request_queue import SharedCluster
    from flowspec_edge.device_profile import Profile
    from flowspec_edge.drivers.virtual.place import Virtual


INTERRUPTED = 130  # exit code: 128 + SIGINT, the shells' convention


@dataclass(frozen=True)
class ClockSettings:
    """The clock of a command.

    profile         None: this machine's own time
    right_children  as ``VirtualCluster``'s
    """

    clock: Clock
    profile: Profile | None
    right_children: float = 1.0

    @property
    def emulated(self) -> bool:
        return self.clock == "wall" and self.profile is not None

    @property
    def profile_name(self) -> str | None:
        return self.profile.name if self.profile else None

    def backend(self, stages: int, device: str) -> Here | Virtual:
        if self.clock == "wall":
            return local_processes(stages, device, self.profile)
        assert self.profile is not None
        from flowspec_edge.drivers.virtual.place import Virtual

        return Virtual(self.profile, right_children=self.right_children)

    def processes(self, stages: int) -> int:
        """Return the number of processes that compute; on a GPU, with D0's, which the only stage shares."""
        return stages + 1 if self.clock == "wall" and stages > 1 else 1


def choose_clock(clock: Clock, profile: str, emulate: str | None) -> ClockSettings:
    """Raise UsageError for an unknown profile."""
    from flowspec_edge.boards.planning.testbed import profile_or_testbed  # pydantic takes a while

    device_profile = profile_or_testbed(profile)  # in real time, too: a wrong name is an error
    if emulate is not None:
        return ClockSettings("wall", profile_or_testbed(emulate))
    return ClockSettings(clock, device_profile if clock == "virtual" else None)


def local_processes(stages: int, device: str, emulate: Profile | None = None) -> Here:
    """Return processes on this machine, in their own time or that of ``emulate``.

    Those on a CPU begin to import torch now, while this process does.
    """
    if device == "cpu":
        from flowspec_edge.drivers.processes.forkserver import preload

        preload()
    if emulate is None:
        return Here()
    from flowspec_edge.drivers.virtual.devices import Devices
    from flowspec_edge.lab.emulation.emulator import emulated

    return emulated(Devices.from_profile(emulate, stages))


def answer(cluster: ClusterBackend, request: Request, on_tokens: OnTokens) -> Result:
    """Run a request and return its result.

    The first Ctrl-C after a token cancels the request, which ends within a turn or two; any other raises
    KeyboardInterrupt.
    """
    has_tokens = stopped = False

    def on_new_tokens(tokens: list[int]) -> None:
        nonlocal has_tokens
        has_tokens = True
        on_tokens(tokens)

    def stop() -> None:
        nonlocal stopped
        stopped = True

    with first_interrupt(stop, lambda: has_tokens):
        if cluster.clock == "virtual":
            from flowspec_edge.drivers.virtual.cluster import VirtualCluster

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
def first_interrupt(stop: Callable[[], object], condition: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Have the first Ctrl-C within the block call ``stop`` if ``condition()``; any other is as before the block."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # a background job of a shell ignores it
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        if condition():
            stop()
        else:
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
