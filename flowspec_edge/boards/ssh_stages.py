"""The stages of a run on boards, started over ssh: D0 is here, one worker on each verify device.

The worker receives its configuration and keys on stdin; neither is written to the board's disk.  The ssh
connection stays open for the whole run: when it closes, a shell on the board kills the worker, and a worker
whose sshd has died exits.  So the stages of one run end before those of the next start.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from flowspec_edge.boards.commands import BEGUN, SshRunner, end_process, failure, has_address_of
from flowspec_edge.boards.inventory import Inventory
from flowspec_edge.boards.links.addresses import network_address
from flowspec_edge.boards.paths import PYTHON
from flowspec_edge.drivers.processes.spec import Connected
from flowspec_edge.drivers.ring import Ring
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.manifest import RunDtype
from flowspec_edge.transport import keys
from flowspec_edge.util import torchdevice
from flowspec_edge.util.interpreter import module_command

# A shell on the board runs this with a line count and the worker's command as arguments.  Stdin has one line
# with the key, then that many lines of configuration without ``parent``.  The shell execs the worker, which
# reads both from file descriptors; $PPID is the connection's sshd.
_START = """
IFS= read -r key
config=$(head -n "$0")
exec 5<&0
(cat <&5; kill $$) >/dev/null 2>&1 &
exec "$@" 5<&- 3<<CONFIG 4<<KEY
parent = $PPID
$config
CONFIG
$key
KEY
"""

_BEGINNING = 1 << 16  # bytes of a stage's output that its login may have printed


@dataclass(frozen=True, slots=True)
class _Stage:
    name: str
    client: subprocess.Popen[bytes]
    output: IO[bytes]  # stdout and stderr
    runner: SshRunner
    since: float  # time.monotonic() at its start


class SshBoards:
    """A worker on each verify device, over ssh (``spec.BoardStages``).

    It must be used on the inventory's draft device.
    """

    def __init__(self, inventory: Inventory, model: str, dtype: RunDtype = "fp32",
                 refresh: Callable[[], None] = lambda: None) -> None:
        """Take the boards and the model that they are to run.

        model  directory on the boards, the same on all; each needs only its own part

        Raise UsageError on another machine than the draft device, or without D0's torch device.
        """
        draft = inventory.draft
        if not has_address_of(draft):
            raise UsageError(f"this machine is not {draft.label}, the draft device of cluster "
                             f"{inventory.cluster.name}, which has to run this: run it there, or start the "
                             "cluster's own services from here with: flowspec deploy up")
        if inventory.cluster.in_image and inventory.cluster.python == PYTHON:
            raise UsageError('runtime = "image": measuring over boards needs a flowspec there outside containers: name '
                             "its interpreter, python in the cluster file, or deploy environments")
        self.device = inventory.torch_device(draft)  # of D0
        torchdevice.require(self.device)
        self._inventory, self._model = inventory, model
        self._dtype: RunDtype = dtype
        self.refresh = refresh
        self._stages: list[_Stage] = []
        self._undo = ExitStack()

    def connect(self) -> Connected:
        """Start the workers without waiting: D0's handshake finds out whether they run.

        Links are encrypted, with keys generated for this run.  Raise FlowspecError if a host name does not resolve.
        """
        inventory = self._inventory
        try:
            directory = Path(self._undo.enter_context(TemporaryDirectory(prefix="flowspec-")))
            pairs = [keys.generate() for _ in inventory.device]
            for rank, pair in enumerate(pairs):
                keys.save(pair, directory / f"key{rank}")
            ring = _ring(inventory, [pair.public.decode() for pair in pairs])
            for rank, device in enumerate(inventory.verify, start=1):
                key = (directory / f"key{rank}").read_text(encoding="ascii")
                runner = SshRunner(inventory, device, own_connection=True)
                lines = _without_parent(ring.config(
                    rank, model=self._model, dtype=self._dtype, device=inventory.torch_device(device),
                    key_file="/dev/fd/4"))
                worker = module_command("flowspec_edge.drivers.stage", "--config", "/dev/fd/3",
                                        python=inventory.python(device))
                self._start(device.name, runner,
                            runner.announced(["sh", "-c", _START, str(len(lines)), *worker]),
                            "".join([key, *lines]))
        except BaseException:
            self.disconnect()
            raise
        return Connected(ring.addresses(directory / "key0"), self._exited)

    def disconnect(self) -> None:
        """Close the connections, which ends the stages; idempotent."""
        clients = [stage.client for stage in self._stages]
        for client in clients:
            client.terminate()
        for client in clients:
            assert client.stdin is not None
            with suppress(BrokenPipeError):
                client.stdin.close()
            end_process(client)
        self._stages = []
        self._undo.close()

    def _exited(self) -> str | None:
        """Return the first stage that has exited, and why; None while all run."""
        for stage in self._stages:
            code = stage.client.poll()
            if code is not None:
                stage.output.seek(0)
                text = stage.output.read().decode(errors="replace")
                return f"{stage.name}: " + failure("flowspec worker", ["ssh"], code, text)
            assert stage.runner.login_s is not None
            if time.monotonic() - stage.since > stage.runner.login_s:
                beginning = os.pread(stage.output.fileno(), _BEGINNING, 0)  # the client writes on at the end
                if BEGUN.encode() not in beginning:
                    return str(stage.runner.hangs_at_login(beginning))
        return None

    def _start(self, name: str, runner: SshRunner, command: list[str], stdin: str) -> None:
        output: IO[bytes] = self._undo.enter_context(TemporaryFile())  # noqa: SIM115
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output,
                                  start_new_session=True)  # Ctrl-C is for D0
        self._stages.append(_Stage(name, client, output, runner, time.monotonic()))
        assert client.stdin is not None
        with suppress(BrokenPipeError):  # the client's stderr has the reason
            client.stdin.write(stdin.encode())
            client.stdin.flush()


def _ring(inventory: Inventory, public: Sequence[str]) -> Ring:
    cluster, life = inventory.cluster, uuid.uuid4().hex[:8]
    hosts = ring_addresses(inventory)
    return Ring(f"tcp://{hosts[0]}:{cluster.control_port}", [f"tcp://{host}:{cluster.data_port}" for host in hosts],
                [f"v{stage}-{life}" for stage in range(1, len(hosts))], public)


def ring_addresses(inventory: Inventory) -> list[str]:
    """Return the addresses by which the boards reach D0, V1…VN; FlowspecError names every board without one."""
    hosts: list[str] = []
    errors: list[FlowspecError] = []
    for device in inventory.ring[:-1]:
        try:
            hosts.append(network_address(inventory, device))
        except FlowspecError as error:
            errors.append(error)
    if not errors:
        return hosts
    causes = "; ".join(map(str, errors))
    if all(isinstance(error, UsageError) for error in errors):
        raise UsageError(causes)
    raise FlowspecError(f"{causes}: give a board's IPv4 address in the cluster file, or a name that all boards know")


def _without_parent(config: WorkerConfig) -> list[str]:
    return [line for line in config.dump().splitlines(keepends=True) if not line.startswith("parent = ")]
