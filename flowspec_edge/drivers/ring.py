"""The devices of a cluster in the order in which data passes them: D0, V1…VN, and D0 again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec_edge.drivers.stage.config import WorkerConfig


@dataclass(frozen=True)
class Addresses:
    """What D0 needs to connect to its stages. Addresses are ZeroMQ endpoints; sequences start with V1."""

    control: str  # where D0 listens for the stages' control connections
    output: str  # where D0 listens for VN's outputs
    first: str  # where V1 receives segments
    instances: Sequence[str]  # the stages' instance ids
    key_file: Path | None = None  # D0's own pairs; None: no encryption
    public_key: str = ""  # of D0's pair in ``key_file``, Z85; empty: the only one
    worker_keys: Sequence[bytes] = ()  # the stages' public keys, with ``key_file``
    unencrypted: bool = False  # allows links without keys beyond loopback
    digests: Sequence[str] = ()  # the digests that the stages' shards must have; empty: any


@dataclass(frozen=True)
class Ring:
    """Addresses are ZeroMQ endpoints.

    control    where D0 listens for the stages' control connections
    data       where each device receives data, D0 first: D0 outputs, Vi segments
    instances  the stages' instance ids, V1's first
    keys       the devices' public keys (Z85), D0's first; empty: no encryption
    """

    control: str
    data: Sequence[str]
    instances: Sequence[str]
    keys: Sequence[str] = ()

    def config(self, stage: int, **settings: Any) -> WorkerConfig:
        """Return the configuration of V``stage``; ``settings``: its other fields, by name."""
        following = (stage + 1) % len(self.data)  # VN's results go to D0
        fields: dict[str, Any] = {
            "instance": self.instances[stage - 1], "stage": stage, "stages": len(self.instances),
            "control": self.control, "listen": self.data[stage], "next": self.data[following]}
        if self.keys:
            fields |= {"control_key": self.keys[0], "previous_key": self.keys[stage - 1],
                       "next_key": self.keys[following]}
        return WorkerConfig(**{**fields, **settings})

    def addresses(self, key_file: Path | None = None) -> Addresses:
        """Return what D0 needs; ``key_file``: its own key, if the ring has keys."""
        return Addresses(self.control, self.data[0], self.data[1], self.instances, key_file,
                         worker_keys=[key.encode() for key in self.keys[1:]])
