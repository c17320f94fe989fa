"""Runs commands on a board, here or over ssh; a failure becomes one line.

ssh is the system's OpenSSH client, with the user's configuration, keys and jump hosts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.util.urls import place_of

_Board = TypeVar("_Board")
_Result = TypeVar("_Result")
TIMEOUT_S = 60.0
_GRACE_S = 3.0  # for a process to end
_CONNECT_S = 10
_ALIVE_S = 5  # between keep-alives; three may be missed
_SSH_PORT = 22
SBIN = "/usr/sbin:/sbin"  # ip and tc; may be missing in an ordinary user's PATH
# tar's last line has no cause; the line before has.
_NO_CAUSE = ("tar: Exiting with failure status", "tar: Error is not recoverable")


class Unreached(FlowspecError):
    """No answer: ssh failed, or the command exceeded its deadline."""


class Runner(ABC):
    def __init__(self, where: str, timeout_s: float) -> None:
        """``where``: the device's name in error messages."""
        self.where, self._timeout_s = where, timeout_s

    @abstractmethod
    def command(self, argv: Sequence[str]) -> list[str]:
        """The local command that runs ``argv`` on the device, with stdin and stdout connected."""

    def run(self, argv: Sequence[str], stdin: str | IO[bytes] | None = None) -> str:
        """The stdout of ``argv``; ``stdin``: a text or an open file.

        FlowspecError, with the last line of stderr, if it cannot be started or fails; Unreached if ssh fails
        or the command exceeds the deadline.
        """
        name, local = argv[0], self.command(argv)
        given: dict[str, Any] = ({"input": (stdin or "").encode()} if stdin is None or isinstance(stdin, str)
                                 else {"stdin": stdin})
        try:
            done = subprocess.run(local, capture_output=True, timeout=self._timeout_s, check=False,
                                  env={**os.environ, "PATH": search_path()}, **given)
        except OSError as error:
            raise FlowspecError(f"{self.where}: cannot run {local[0]}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise Unreached(f"{self.where}: {name} did not finish within {self._timeout_s:g} s: see whether "
                            "the board hangs (uptime, dmesg), then run this again") from error
        if done.returncode:
            kind = Unreached if _by_ssh(local, done.returncode) else FlowspecError
            raise kind(f"{self.where}: "
                       + failure(name, local, done.returncode, done.stderr.decode(errors="replace")))
        return str(done.stdout.decode(errors="replace"))


class LocalRunner(Runner):
    """``prefix`` goes before each command, such as nsenter with its options."""

    def __init__(self, where: str = "this machine", prefix: Sequence[str] = (),
                 timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(where, timeout_s)
        self._prefix = list(prefix)

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self._prefix, *argv]


def failure(name: str, argv: Sequence[str], code: int, stderr: str) -> str:
    """How the command ``name``, run as the local ``argv``, failed: the end of a sentence."""
    if _by_ssh(argv, code):
        name = "ssh"
    prefix = "" if name == "sh" else f"{name}: "  # a script's commands name themselves
    return prefix + (last_line(stderr).removeprefix(prefix) or f"exit code {code}")


def _by_ssh(argv: Sequence[str], code: int) -> bool:
    return code == 255 and argv[0] == "ssh"


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines())
                 if line.strip() and not line.startswith(_NO_CAUSE)), "")


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"


def as_root(argv: Sequence[str]) -> list[str]:
    """``argv`` as root: by sudo without a password, unless the user is root."""
    return ["sh", "-c", '[ "$(id -u)" = 0 ] || set -- sudo -n -- "$@"; exec "$@"', "sh", *argv]


def on_each(function: Callable[[_Board], _Result], boards: Sequence[_Board]) -> list[_Result]:
    """``function`` of all boards at once; the results in their order."""
    with ThreadPoolExecutor(max(1, len(boards))) as pool:
        return list(pool.map(function, boards))


def end_process(client: subprocess.Popen[bytes]) -> None:
    """Wait for a process that has been told to end, and kill it if it does not."""
    try:
        client.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        client.kill()
        client.wait()  # no deadline: SIGKILL ends it


def missing_tools(packages: Iterable[tuple[str, str]]) -> list[str]:
    """Of (tool, Debian package), the tools that this machine lacks, each with its package."""
    return [f"{tool} (Debian package {package})" for tool, package in packages
            if shutil.which(tool, path=search_path()) is None]


class SshRunner(Runner):
    """Never prompts: a password or an unknown host key is an error."""

    def __init__(self, inventory: Inventory, device: DeviceEntry, timeout_s: float = TIMEOUT_S,
                 own_connection: bool = False) -> None:
        """``own_connection``: no ControlMaster sharing, so that the remote sshd ends with this command."""
        super().__init__(f"{device.name} ({device.address})", timeout_s)
        options: dict[str, str | int] = {
            "BatchMode": "yes", "ConnectTimeout": _CONNECT_S, "ServerAliveInterval": _ALIVE_S,
            "ServerAliveCountMax": 3, "LogLevel": "ERROR", "Port": device.ssh_port}
        if own_connection:
            options["ControlPath"] = "none"
        if device.ssh_user:
            options["User"] = device.ssh_user
        if device.ssh_key:
            options |= {"IdentityFile": device.ssh_key, "IdentitiesOnly": "yes"}
        file = ["-F", inventory.cluster.ssh_config] if inventory.cluster.ssh_config else []
        self._ssh = ["ssh", "-T", *file, *(part for key, value in options.items()
                                           for part in ("-o", f"{key}={value}")), "--", device.address]

    def command(self, argv: Sequence[str]) -> list[str]:
        # exec makes the program a child of sshd, so that it ends with the connection.
        return [*self._ssh, f"exec {shlex.join(argv)}"]

    def connecting(self, host: str, port: int) -> list[str]:
        """The local command whose stdin and stdout are a TCP connection from the board to ``host``."""
        *options, end, address = self._ssh
        return [*options, "-W", place_of(host, port), end, address]


def runner_for(inventory: Inventory, device: DeviceEntry, timeout_s: float = TIMEOUT_S,
               own_connection: bool = False) -> Runner:
    if is_here(device):
        return LocalRunner(device.name, timeout_s=timeout_s)
    return SshRunner(inventory, device, timeout_s, own_connection)


def python_for(inventory: Inventory, device: DeviceEntry) -> str:
    """The interpreter for ``runner_for``: ``sys.executable`` if ``device`` is this machine."""
    return sys.executable if is_here(device) else inventory.python(device)


def is_here(device: DeviceEntry) -> bool:
    """Whether ``device`` is this machine, which needs no ssh.

    False for another ``ssh_port`` than 22, which may be forwarded from an address of this machine to another
    one.  FlowspecError if the device's name does not resolve.
    """
    if device.ssh_port != _SSH_PORT:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((resolve(device), 0))
        except OSError:
            return False
    return True
