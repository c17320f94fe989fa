"""The stages of one run on the boards of a cluster, started over ssh.

Knows how a worker gets its configuration and keys without either touching a disk there, and that it
ends with the connection.  Does not know what D0 asks of the stages.

Standard input stays open as long as we live.  When it ends, because we closed it or died, a shell
on the board ends the worker, at whatever it is; and a worker whose sshd is gone ends by itself.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.commands import failure
from flowspec_edge.fleet.inventory import Inventory, resolve
from flowspec_edge.fleet.ssh import SshRunner
from flowspec_edge.runtime.local import Addresses
from flowspec_edge.runtime.workerconfig import Dtype, WorkerConfig
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.transport import keys

_GRACE_S = 3.0  # for an ssh client to end

# Run by a shell on the board with Python and a number of lines; standard input is a key file's line,
# empty for none, then those lines, a configuration without ``parent``.  The shell becomes the worker,
# which reads both from descriptors; $PPID is the sshd that serves the connection.
_START = """
IFS= read -r key
config=$(head -n "$1")
exec 5<&0
(cat <&5; kill $$) >/dev/null 2>&1 &
exec "$0" -m flowspec_edge.runtime.worker --config /dev/fd/3 5<&- 3<<CONFIG 4<<KEY
parent = $PPID
$config
CONFIG
$key
KEY
"""


@dataclass(frozen=True, slots=True)
class _Stage:
    name: str
    client: subprocess.Popen[bytes]
    said: IO[bytes]  # its stdout and stderr


class RemoteStages:
    """One worker on each verify device; a context manager that ends them.

    ``addresses`` are for ``ProcessCluster(..., addresses=...)``, which must run on the draft device.
    """

    def __init__(self, inventory: Inventory, model: str, dtype: Dtype, *,
                 parallelism: Parallelism = "pipeline", encrypted: bool = True, threads: int = 0) -> None:
        """Start them; that they are up is D0's to find out.

        model      the model's directory on the boards, the same on all; of a sharded one its part is enough
        encrypted  CURVE on every link, with keys made for this run
        threads    of torch in each stage; 0 leaves its default

        UsageError if tensor-parallel ranks are to be encrypted; FlowspecError if a name is unknown.
        """
        if encrypted and parallelism != "pipeline":
            raise UsageError(f"{parallelism}: collectives cannot be encrypted; "
                             "use a pipeline, or a network that you trust")
        self._stages: list[_Stage] = []
        self._undo = ExitStack()
        try:
            directory = Path(self._undo.enter_context(TemporaryDirectory(prefix="flowspec-")))
            pairs = [keys.generate() for _ in inventory.device] if encrypted else []
            for place, pair in enumerate(pairs):
                keys.save(pair, directory / f"key{place}")
            self.addresses = _addresses(inventory, pairs, directory / "key0")
            configs = _configs(inventory, self.addresses, pairs, {
                "model": model, "dtype": dtype, "threads": threads,
                "parallelism": parallelism})
            for device, config in zip(inventory.verify, configs, strict=True):
                key = (directory / f"key{config.stage}").read_text(encoding="ascii") if pairs else ""
                runner = SshRunner(inventory, device, own_connection=True)
                lines = _without_parent(config)
                self._start(device.name, runner.command(
                    ["sh", "-c", _START, inventory.python(device), str(len(lines))]),
                    "".join([key or "\n", *lines]))
        except BaseException:
            self.close()
            raise

    def exited(self) -> str | None:
        """The first stage that has ended, and why; None while all run."""
        for stage in self._stages:
            code = stage.client.poll()
            if code is not None:
                stage.said.seek(0)
                text = stage.said.read().decode(errors="replace")
                return f"{stage.name}: " + failure("flowspec worker", ["ssh"], code, text)
        return None

    def close(self) -> None:
        """End the connections, and with them the stages; safe to call twice."""
        clients = [stage.client for stage in self._stages]
        for client in clients:
            client.terminate()
        for client in clients:
            assert client.stdin is not None
            with suppress(BrokenPipeError):
                client.stdin.close()
            try:
                client.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait()
        self._stages = []
        self._undo.close()

    def __enter__(self) -> RemoteStages:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, name: str, command: list[str], stdin: str) -> None:
        said: IO[bytes] = self._undo.enter_context(TemporaryFile())  # noqa: SIM115
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said,
                                  start_new_session=True)  # Ctrl-C is for D0
        self._stages.append(_Stage(name, client, said))
        assert client.stdin is not None
        with suppress(BrokenPipeError):  # why, the client will have said
            client.stdin.write(stdin.encode())
            client.stdin.flush()


def _addresses(inventory: Inventory, pairs: Sequence[keys.KeyPair], key_file: Path) -> Addresses:
    cluster, life = inventory.cluster, uuid.uuid4().hex[:8]
    d0, first = resolve(inventory.draft), resolve(inventory.verify[0])
    return Addresses(
        control=f"tcp://{d0}:{cluster.control_port}", output=f"tcp://{d0}:{cluster.data_port}",
        first=f"tcp://{first}:{cluster.data_port}",
        instances=[f"v{stage}-{life}" for stage in range(1, len(inventory.verify) + 1)],
        key_file=key_file if pairs else None, worker_keys=[pair.public for pair in pairs[1:]],
        unencrypted=not pairs)


def _configs(inventory: Inventory, addresses: Addresses, pairs: Sequence[keys.KeyPair],
             shared: dict[str, Any]) -> list[WorkerConfig]:
    """The stages' configurations; ``parent`` is known to the board alone."""
    devices = inventory.verify
    listen = [f"tcp://{resolve(device)}:{inventory.cluster.data_port}" for device in devices]
    following = [*listen[1:], addresses.output]
    found = []
    for i, device in enumerate(devices):
        own: dict[str, Any] = {}
        if pairs:
            public = [pair.public.decode() for pair in pairs]
            own = {"key_file": "/dev/fd/4", "control_key": public[0], "previous_key": public[i],
                   "next_key": public[(i + 2) % len(public)]}
        if shared["parallelism"] != "pipeline":
            own |= {"group": f"tcp://{resolve(devices[0])}:{inventory.cluster.group_port}",
                    "interface": inventory.interface(device)}
        found.append(WorkerConfig(
            instance=addresses.instances[i], stage=i + 1, stages=len(devices),
            device=inventory.torch_device(device), control=addresses.control, listen=listen[i],
            next=following[i], unencrypted=addresses.unencrypted, **own, **shared))
    return found


def _without_parent(config: WorkerConfig) -> list[str]:
    return [line for line in config.dump().splitlines(keepends=True) if not line.startswith("parent = ")]
