"""Where the devices of a cluster on one machine are, and the listening sockets of its stages."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from flowspec_edge.drivers.ring import Ring
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.transport import keys

_LOOPBACK = "127.0.0.1"


class Placement(Protocol):
    """Where a cluster's devices are on this machine: place 0 is D0, place i is Vi."""

    @property
    def control_port(self) -> int:
        """Port of D0's control channel; 0: any free port."""

    def address(self, rank: int) -> str:
        ...

    def entered(self, rank: int) -> AbstractContextManager[None]:
        """Sockets that the calling thread creates inside are in the device's network namespace."""

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """Wrap ``command`` to run on the device; the process id must stay the same."""


class Loopback:
    control_port = 0

    def address(self, rank: int) -> str:
        return _LOOPBACK

    def entered(self, rank: int) -> AbstractContextManager[None]:
        return nullcontext()

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        return list(command)


class LocalPlan:
    """The ring of stages on this machine, with keys of its own.

    The listening sockets exist before any stage starts, so no other program can take a port that was chosen.
    This process keeps the sockets open, so that peers of a restarting stage wait in the backlog.
    """

    def __init__(self, stages: int, directory: Path, placement: Placement) -> None:
        """Choose the addresses of a cluster; ``directory`` receives the key files."""
        self._open = ExitStack()
        self._placement = placement
        self._listeners = [self._listener(rank) for rank in range(1, stages + 1)]
        self._directory = directory
        public = []
        for rank in range(stages + 1):
            pair = keys.generate()
            keys.save(pair, self._key_file(rank))
            public.append(pair.public.decode())
        life = uuid.uuid4().hex[:8]
        d0_address = f"tcp://{placement.address(0)}"
        self._ring = Ring(
            f"{d0_address}:{placement.control_port or '*'}",
            [f"{d0_address}:*", *("tcp://{}:{}".format(*listener.getsockname()) for listener in self._listeners)],
            [f"v{stage}-{life}" for stage in range(1, stages + 1)], public)
        self.addresses = self._ring.addresses(self._key_file(0))

    def configs(self, control: str, output: str, **settings: Any) -> list[WorkerConfig]:
        """Return the stages' configurations.

        D0 already listens at ``control`` and ``output``; ``settings``: what all stages share.
        """
        ring = replace(self._ring, control=control, data=[output, *self._ring.data[1:]])
        return [ring.config(rank, listen_fd=listener.fileno(), parent=os.getpid(),
                            key_file=str(self._key_file(rank)), **settings)
                for rank, listener in enumerate(self._listeners, start=1)]

    def _listener(self, rank: int) -> socket.socket:
        with self._placement.entered(rank):
            return self._open.enter_context(socket.create_server((self._placement.address(rank), 0)))

    def close(self) -> None:
        self._open.close()

    def _key_file(self, rank: int) -> Path:
        return self._directory / f"key{rank}"
