"""What a cluster is (``ClusterSpec``), and where its devices are, for ``clusters.open_cluster``.

This module imports quickly, because the command line builds both values before it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from flowspec_edge.d0.observer import Observer
    from flowspec_edge.d0.request import SchedulingPolicy
    from flowspec_edge.drivers.observe.power import PowerMeter
    from flowspec_edge.drivers.processes.addresses import Placement
    from flowspec_edge.drivers.processes.emulator import Emulator
    from flowspec_edge.drivers.ring import Addresses


@dataclass(frozen=True)
class ClusterSpec:
    """A model on a draft device (D0) and ``stages`` stages.

    model          the model's directory, as D0 sees it
    dtype          "fp32", "bf16" or "fp16", for activations, caches and all weights that are not in 4 bits
    device         torch device of D0, and of the stages that D0 starts
    threads        torch threads per process; None divides the cores. Not for stages on boards
    at_once        number of concurrent requests, each with its own caches
    cache_rows     limit for the rows in a stage's caches (``capacity.cache_rows``): requests wait for room,
                   and free room keeps prefixes. None: no limit, and no prefix cache
    reserve        stages that D0 starts allocate the memory for ``cache_rows`` at their start
    scheduling_policy  how concurrent requests share the stages (``Scheduler``)
    dead_after     seconds of silence after which a stage counts as lost
    start_within   seconds for all stages to say Hello
    rejoin_within  seconds for a lost stage to come back, while open requests wait; 0: every loss is final.
                   D0 restarts the stages that it started
    meter          running power meter of this board; None: one of the cluster's own, if its times are real.
                   Results have the energy if every board has one
    slow           entered around calls that may take minutes on a slow disk (loading D0's models)
    idle_s         seconds to measure idle power before the first request; only with a meter

    In virtual time, only the model, ``scheduling_policy`` and ``observer`` matter.
    """

    model: Path
    stages: int
    dtype: str = "fp32"
    _: KW_ONLY
    device: str = "cpu"
    threads: int | None = None
    at_once: int = 8
    cache_rows: int | None = None
    reserve: bool = False
    scheduling_policy: SchedulingPolicy = "fair"
    dead_after: float = 5.0
    start_within: float = 180.0
    rejoin_within: float = 0.0
    observer: Observer | None = None
    meter: PowerMeter | None = None
    idle_s: float = 0.0
    slow: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Here:
    """The stages are processes on this machine, which D0 starts and ends.

    network    the devices' addresses and network namespaces; None: loopback, and stages that are forks
    emulator   makes the processes take the time of other devices; None: they take their own
    """

    network: Placement | None = None
    emulator: Emulator | None = None


@dataclass(frozen=True)
class Connected:
    """The stages run already; D0 neither starts nor ends them.

    watch    called several times a second; returns why a stage has ended for good, or None
    waiting  called repeatedly with the stages that have not said Hello: ["V1", …]
    """

    addresses: Addresses
    watch: Callable[[], str | None] = lambda: None
    waiting: Callable[[list[str]], None] = lambda stages: None


@runtime_checkable
class BoardStages(Protocol):
    """The stages are on boards. For the first request D0 connects to them, and starts them if need be."""

    def connect(self) -> Connected:
        ...

    def refresh(self) -> None:
        """Take in what has changed; called before every request."""

    def disconnect(self) -> None:
        """End the stages that :meth:`connect` started; idempotent."""


Processes = Here | Connected | BoardStages
C_co = TypeVar("C_co", covariant=True)


class ExecutionBackend(Protocol[C_co]):
    """A backend with clusters of its own, such as ``drivers.virtual.place.Virtual``."""

    def open(self, spec: ClusterSpec) -> C_co:
        ...
