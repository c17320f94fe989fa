"""Services for the tests: a cluster's configurations on loopback, and a service manager's ear."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

from flowspec_edge.d0.config import DraftConfig
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.transport import keys
from kits.process_clusters import PATIENCE


def own_address() -> str:
    """A loopback address that no other process uses: a port that is free there stays free."""
    pid = os.getpid()
    return f"127.{1 + (pid >> 16) % 250}.{pid >> 8 & 255}.{pid & 255}"


# Below those that the kernel gives to connections and servers that name none, which might take one meanwhile; each
# process begins elsewhere, and none comes twice.
_PORTS = islice(cycle(range(10_000, 30_000)), os.getpid() * 97 % 20_000, None)


def free_port(host: str = "127.0.0.1") -> int:
    """A port at which a server can listen that is started soon."""
    for port in _PORTS:
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise AssertionError("the ports have no end")


class Ear:
    """systemd's end of the notification socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)

    def hear(self, within: float = PATIENCE) -> str:
        """The next words; "" if none come."""
        self._socket.settimeout(within)
        try:
            return self._socket.recv(4096).decode()
        except TimeoutError:
            return ""

    def until(self, words: str) -> list[str]:
        """What is said up to ``words``, these included."""
        said, deadline = [self.hear()], time.monotonic() + PATIENCE
        while words not in said[-1]:
            assert said[-1], f"{words} did not come, only {said}"
            assert time.monotonic() < deadline, f"{words} did not come, only {said}"
            said.append(self.hear())
        return said

    def close(self) -> None:
        self._socket.close()


class Services:
    """The configurations of a draft device and the stages of a sharded model, with keys, in ``directory``."""

    def __init__(self, model: Path, directory: Path, changes: dict[str, object] | None = None,
                 hosts: Sequence[str] = ()) -> None:
        """
        changes  what differs from the usual configuration of the draft device
        hosts    addresses of the draft device and the stages, which share no ports; empty: all here
        """
        directory.mkdir(exist_ok=True)
        stages = Manifest.read(model).stages
        pairs = [keys.generate() for _ in range(stages + 1)]
        files = [directory / f"key{place}" for place in range(stages + 1)]
        for pair, file in zip(pairs, files, strict=True):
            keys.save(pair, file)
        public = [pair.public.decode() for pair in pairs]
        host = own_address()
        if hosts:
            control, output, *listen = (f"tcp://{at}:{7701 + i}" for i, at in enumerate([hosts[0], *hosts]))
        else:
            control, output, *listen = (f"tcp://{host}:{free_port(host)}" for _ in range(stages + 2))
        following = [*listen[1:], output]
        self.directory, port = directory, free_port(host)
        self.url = f"http://{host}:{port}"
        self.draft_file = directory / "draft.toml"
        self.worker_files = [directory / f"verify-{stage}.toml" for stage in range(1, stages + 1)]
        for i, file in enumerate(self.worker_files):
            # A forked stage has a parent, and would not wait as long for a draft device that imports.
            file.write_text(WorkerConfig(
                lost_after_s=PATIENCE,
                instance=f"v{i + 1}-r1", stage=i + 1, stages=stages, model=str(model), threads=1,
                control=control, listen=listen[i], next=following[i], key_file=str(files[i + 1]),
                control_key=public[0], previous_key=public[i], next_key=public[(i + 2) % len(public)]).dump())
        self.draft = DraftConfig.model_validate({
            "cluster": "test", "model": str(model), "name": "tiny", "dtype": "fp32", "control": control,
            "output": output, "first": listen[0], "key_file": str(files[0]), "worker_keys": public[1:],
            "instances": [f"v{stage}-r1" for stage in range(1, stages + 1)], "threads": 1,
            "host": host, "port": port, **(changes or {})})
        self.draft_file.write_text(self.draft.dump())


def command(name: str, config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "flowspec_edge.cli.main", name, "--config", str(config), *arguments]
