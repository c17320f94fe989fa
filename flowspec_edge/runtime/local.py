"""Where the devices of a cluster are; and a plan for one on loopback.

Knows addresses, keys and who connects to whom.  Does not know processes or messages.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec_edge.runtime.workerconfig import Dtype, WorkerConfig
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.transport import keys

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Addresses:
    """What D0 must know to meet its stages; addresses are ZeroMQ endpoints.

    ``worker_keys`` are the stages' public keys, in order, if ``key_file`` (D0's own) is given.
    """

    control: str  # where D0 listens for the stages' control connections
    output: str  # where D0 listens for VN's outputs
    first: str  # where V1 takes segments
    instances: Sequence[str]  # the stages' instance ids, V1's first
    key_file: Path | None = None
    worker_keys: Sequence[bytes] = ()


class LocalPlan:
    """Stages on this machine; holds their listening sockets until :meth:`close`.

    The sockets listen before any stage starts: so no port can be lost between choosing it and
    binding it, and no stage has to wait for another.
    """

    def __init__(self, stages: int, directory: Path, encrypted: bool) -> None:
        """Key files are written to ``directory``."""
        self._open = ExitStack()
        self._doors = [self._open.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(stages)]
        self._listen = [f"tcp://{_LOOPBACK}:{door.getsockname()[1]}" for door in self._doors]
        self._directory = directory
        self._public: list[str] = []  # D0's, then the stages'
        for place in range(stages + 1) if encrypted else ():
            pair = keys.generate()
            keys.save(pair, self._key_file(place))
            self._public.append(pair.public.decode())
        life = uuid.uuid4().hex[:8]
        self.addresses = Addresses(
            control=f"tcp://{_LOOPBACK}:*", output=f"tcp://{_LOOPBACK}:*", first=self._listen[0],
            instances=[f"v{stage}-{life}" for stage in range(1, stages + 1)],
            key_file=self._key_file(0) if encrypted else None,
            worker_keys=[public.encode() for public in self._public[1:]],
        )

    def configs(self, control: str, output: str, model: Path, dtype: Dtype, threads: int | None,
                parallelism: Parallelism) -> list[WorkerConfig]:
        """The stages' configurations, once D0 listens at ``control`` and ``output``."""
        stages = len(self._doors)
        following = [*self._listen[1:], output]
        shared = threads or max(1, (os.cpu_count() or 1) // stages)
        group: dict[str, Any] = {} if parallelism == "pipeline" else {
            "group": (self._directory / "group").as_uri(), "interface": _loopback_interface()}
        return [
            WorkerConfig(
                instance=self.addresses.instances[i], stage=i + 1, stages=stages,
                model=str(model), dtype=dtype, threads=shared,
                control=control, listen=self._listen[i], next=following[i],
                listen_fd=self._doors[i].fileno(), parent=os.getpid(),
                parallelism=parallelism, **group, **self._key_settings(i + 1),
            )
            for i in range(stages)
        ]

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


def _loopback_interface() -> str:
    """The name of the interface of 127.0.0.1; empty if none looks like it."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "")
