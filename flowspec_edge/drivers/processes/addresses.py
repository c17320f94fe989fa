"""Addresses and keys of a cluster's devices, and the listening sockets of a cluster on one machine."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.model.manifest import ComputeDtype
from flowspec_edge.transport import keys

_LOOPBACK = "127.0.0.1"


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


class Placement(Protocol):
    """Where a cluster's devices are on this machine: place 0 is D0, place i is Vi."""

    @property
    def control_port(self) -> int:
        """Port of D0's control channel; 0: any free port."""

    def address(self, place: int) -> str:
        ...

    def entered(self, place: int) -> AbstractContextManager[None]:
        """Sockets that the calling thread creates inside are in the device's network namespace."""

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        """Wrap ``command`` to run on the device; the process id must stay the same."""


class Loopback:
    control_port = 0

    def address(self, place: int) -> str:
        return _LOOPBACK

    def entered(self, place: int) -> AbstractContextManager[None]:
        return nullcontext()

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        return list(command)


class LocalPlan:
    """Addresses and configurations of stages on this machine.

    The listening sockets exist before any stage starts, so no other program can take a port that was chosen.
    This process keeps the sockets open, so that peers of a restarting stage wait in the backlog.
    """

    def __init__(self, stages: int, directory: Path, placement: Placement) -> None:
        """``directory`` receives the key files."""
        self._open = ExitStack()
        self._placement = placement
        self._listeners = [self._listener(place) for place in range(1, stages + 1)]
        self._listen = ["tcp://{}:{}".format(*listener.getsockname()) for listener in self._listeners]
        self._directory = directory
        self._public: list[str] = []  # D0's, then the stages'
        for place in range(stages + 1):
            pair = keys.generate()
            keys.save(pair, self._key_file(place))
            self._public.append(pair.public.decode())
        life = uuid.uuid4().hex[:8]
        self.addresses = Addresses(
            control=f"tcp://{self._placement.address(0)}:{self._placement.control_port or '*'}",
            output=f"tcp://{self._placement.address(0)}:*", first=self._listen[0],
            instances=[f"v{stage}-{life}" for stage in range(1, stages + 1)],
            key_file=self._key_file(0), worker_keys=[public.encode() for public in self._public[1:]])

    def configs(self, control: str, output: str, model: Path, dtype: ComputeDtype, threads: int,
                emulate: Path | None = None, device: str = "cpu", cache_rows: int = 0, requests: int = 0
                ) -> list[WorkerConfig]:
        """Return the stages' configurations; D0 already listens at ``control`` and ``output``."""
        stages = len(self._listeners)
        following = [*self._listen[1:], output]
        return [
            WorkerConfig(
                instance=self.addresses.instances[i], stage=i + 1, stages=stages,
                model=str(model), dtype=dtype, device=device, threads=threads,
                cache_rows=cache_rows, requests=requests,
                control=control, listen=self._listen[i], next=following[i],
                listen_fd=self._listeners[i].fileno(), parent=os.getpid(),
                emulate=str(emulate or ""), key_file=str(self._key_file(i + 1)),
                control_key=self._public[0], previous_key=self._public[i],
                next_key=self._public[(i + 2) % len(self._public)],  # VN's results go to D0
            )
            for i in range(stages)
        ]

    def _listener(self, place: int) -> socket.socket:
        with self._placement.entered(place):
            return self._open.enter_context(socket.create_server((self._placement.address(place), 0)))

    def close(self) -> None:
        self._open.close()

    def _key_file(self, place: int) -> Path:
        return self._directory / f"key{place}"

