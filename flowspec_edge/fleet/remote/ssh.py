"""Commands on a board by the system's OpenSSH client, with the user's configuration, keys and jump hosts."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Sequence
from typing import IO

from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.fleet.remote.runner import LocalRunner, Runner, finish

TIMEOUT_S = 60.0
_CONNECT_S = 10
_ALIVE_S = 5  # between keep-alives; three may be missed
_SSH_PORT = 22


class SshRunner:
    """Never prompts: a password or an unknown host key is an error."""

    def __init__(self, inventory: Inventory, device: DeviceEntry, timeout_s: float = TIMEOUT_S,
                 own_connection: bool = False) -> None:
        """``own_connection``: no ControlMaster sharing, so that the remote sshd ends with this command."""
        self.where = f"{device.name} ({device.address})"
        self._timeout_s = timeout_s
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
        return [*options, "-W", f"{host}:{port}", end, address]

    def run(self, argv: Sequence[str], stdin: str | IO[bytes] | None = None) -> str:
        return finish(self.where, argv[0], self.command(argv), stdin, self._timeout_s)


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
