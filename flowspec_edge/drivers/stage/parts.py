"""What a stage's process is given beside its configuration: links, and the time that a pass takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.transport.keys import KeyPair
from flowspec_edge.transport.zmq_links import ZmqTransport


@dataclass(frozen=True)
class Charge:
    """The time of a pass on another device than this one.

    seconds  (rows, rows in the caches, share of the pairs of rows that are of one request) -> seconds
    layers   equal steps of it, between which cancels take effect
    """

    seconds: Callable[[int, int, float], float]
    layers: float = 1.0


@dataclass(frozen=True)
class StageParts:
    """What a stage's process is made of.

    ``charge`` None: passes take their own time, and the board's power is the stage's.
    """

    transport: ZmqTransport
    charge: Charge | None = None


MakeParts = Callable[[WorkerConfig, KeyPair | None], StageParts]


def default_parts(config: WorkerConfig, pair: KeyPair | None) -> StageParts:
    """Return the parts of a stage that stands for no other device."""
    return StageParts(ZmqTransport(pair, unencrypted=config.unencrypted))
