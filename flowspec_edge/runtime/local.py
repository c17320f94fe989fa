"""Where the devices of a cluster are; and a plan for one on this machine.

Knows addresses, keys and who connects to whom.  Does not know processes or messages.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flowspec_edge.runtime.workerconfig import Dtype, WorkerConfig
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.transport import keys

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Addresses:
    """What D0 must know to meet its stages; addresses are ZeroMQ endpoints.

    ``worker_keys`` are the stages' public keys, in order, if ``key_file`` (D0's own) is given.
    ``unencrypted``: links beyond loopback may do without keys.  ``digests``: of the shards that the stages
    must have, in order; empty: whichever.
    """

    control: str  # where D0 listens for the stages' control connections
    output: str  # where D0 listens for VN's outputs
    first: str  # where V1 takes segments
    instances: Sequence[str]  # the stages' instance ids, V1's first
    key_file: Path | None = None
    worker_keys: Sequence[bytes] = ()
    unencrypted: bool = False
    digests: Sequence[str] = ()


class Site(Protocol):
    """Where the devices of a cluster on this machine are: place 0 is D0's, place i that of Vi."""

    @property
    def control_port(self) -> int:
        """Where D0's control channel is to listen; 0 leaves the choice to the system."""

    def address(self, place: int) -> str:
        """The device's IPv4 address."""

    def interface(self, place: int) -> str:
        """The network interface that has this address."""

    def entered(self, place: int) -> AbstractContextManager[None]:
        """Within it, the sockets that the calling thread makes are the device's."""

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        """What to run for ``command`` to run on the device, with its process id."""


class Loopback:
    """All of them on 127.0.0.1; implements :class:`Site`."""

    control_port = 0

    def address(self, place: int) -> str:
        return _LOOPBACK

    def interface(self, place: int) -> str:
        """The name of the loopback interface; empty if none looks like it."""
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in names if name.startswith("lo")), "")

    def entered(self, place: int) -> AbstractContextManager[None]:
        return nullcontext()

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        return list(command)


def fair_threads(stages: int) -> int:
    """How many threads of torch each process of a local cluster gets, D0's among them.

    More than there are cores for would spin for one another: twice as many make it half as fast.
    """
    return max(1, (os.cpu_count() or 1) // (stages + 1))


class LocalPlan:
    """Stages on this machine; holds their listening sockets until :meth:`close`.

    The sockets listen before any stage starts: so no port can be lost between choosing it and
    binding it, and no stage has to wait for another.  As long as they are held here a stage can be
    started again: who connects meanwhile waits in the socket's backlog, and is a peer, by ZeroMQ's
    handshake, only of the process that takes it from there.
    """

    def __init__(self, stages: int, directory: Path, encrypted: bool, site: Site | None = None) -> None:
        """Key files are written to ``directory``; without a ``site`` it is loopback."""
        self._open = ExitStack()
        self._site = site or Loopback()
        self._doors = [self._door(place) for place in range(1, stages + 1)]
        self._listen = ["tcp://{}:{}".format(*door.getsockname()) for door in self._doors]
        self._directory = directory
        self._group = directory / "group"
        self._public: list[str] = []  # D0's, then the stages'
        for place in range(stages + 1) if encrypted else ():
            pair = keys.generate()
            keys.save(pair, self._key_file(place))
            self._public.append(pair.public.decode())
        life = uuid.uuid4().hex[:8]
        self.addresses = Addresses(
            control=f"tcp://{self._site.address(0)}:{self._site.control_port or '*'}",
            output=f"tcp://{self._site.address(0)}:*", first=self._listen[0],
            instances=[f"v{stage}-{life}" for stage in range(1, stages + 1)],
            key_file=self._key_file(0) if encrypted else None,
            worker_keys=[public.encode() for public in self._public[1:]], unencrypted=not encrypted,
        )

    def configs(self, control: str, output: str, model: Path, dtype: Dtype, threads: int,
                parallelism: Parallelism, emulate: Path | None = None, device: str = "cpu",
                ) -> list[WorkerConfig]:
        """The stages' configurations, once D0 listens at ``control`` and ``output``.

        ``emulate``: the file that says whose time they take; ``device``: the torch device of all.
        """
        stages = len(self._doors)
        following = [*self._listen[1:], output]
        group = "" if parallelism == "pipeline" else self._group.as_uri()
        return [
            WorkerConfig(
                instance=self.addresses.instances[i], stage=i + 1, stages=stages,
                model=str(model), dtype=dtype, device=device, threads=threads,
                control=control, listen=self._listen[i], next=following[i],
                listen_fd=self._doors[i].fileno(), parent=os.getpid(),
                parallelism=parallelism, group=group, interface=self._site.interface(i + 1) if group else "",
                emulate=str(emulate or ""), unencrypted=self.addresses.unencrypted,
                **self._key_settings(i + 1),
            )
            for i in range(stages)
        ]

    def _door(self, place: int) -> socket.socket:
        with self._site.entered(place):
            return self._open.enter_context(socket.create_server((self._site.address(place), 0)))

    def new_group(self) -> None:
        """All ranks have ended, and others will meet: no trace of those may be left."""
        self._group.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up this process' copies of the sockets."""
        self._open.close()

    def _key_file(self, place: int) -> Path:
        return self._directory / f"key{place}"

    def _key_settings(self, stage: int) -> dict[str, Any]:
        if not self._public:
            return {}
        return {
            "key_file": str(self._key_file(stage)), "control_key": self._public[0],
            "previous_key": self._public[stage - 1],
            "next_key": self._public[(stage + 1) % len(self._public)],  # VN's results go to D0
        }

