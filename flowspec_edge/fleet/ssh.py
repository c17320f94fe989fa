"""Commands on a board, through the system's OpenSSH client.

Knows ssh's options and how a board of the inventory is reached.  Does not know what is run there.
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Mapping, Sequence

from flowspec_edge.fleet.commands import LocalRunner, Runner, finish
from flowspec_edge.fleet.desired import Reach
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve

_CONNECT_S = 10
_ALIVE_S = 5  # between questions whether the board is still there; it may miss three


def openssh(reach: Reach, more: Mapping[str, str] | None = None) -> list[str]:
    """The client's command line, but for the command that is to run there; ``more``: options that go
    before those of ssh's own configuration."""
    options: dict[str, str | int] = {
        "BatchMode": "yes", "ConnectTimeout": _CONNECT_S, "ServerAliveInterval": _ALIVE_S,
        "ServerAliveCountMax": 3, "LogLevel": "ERROR", "Port": reach.port, **(more or {})}
    if reach.user:
        options["User"] = reach.user
    if reach.key:
        options |= {"IdentityFile": reach.key, "IdentitiesOnly": "yes"}
    file = ["-F", reach.config] if reach.config else []
    return ["ssh", "-T", *file, *(part for key, value in options.items()
                                  for part in ("-o", f"{key}={value}")), "--", reach.address]


class SshRunner:
    """Runs commands on one board.  Never asks for a password, nor about a host that is unknown."""

    def __init__(self, inventory: Inventory, device: DeviceEntry, timeout_s: float = 60.0,
                 own_connection: bool = False) -> None:
        """``own_connection``: even where ssh's configuration shares one among commands (ControlMaster),
        so that what runs there can tell by its parent when the command here has ended."""
        self.where = f"{device.name} ({device.address})"
        self._timeout_s = timeout_s
        reach = Reach(device.address, device.ssh_port, device.ssh_user, device.ssh_key,
                      inventory.cluster.ssh_config)
        self._ssh = openssh(reach, {"ControlPath": "none"} if own_connection else {})

    def command(self, argv: Sequence[str]) -> list[str]:
        """See :class:`~flowspec_edge.fleet.commands.Runner`."""
        # exec: what runs there is then a child of sshd itself, and ends with the connection.
        return [*self._ssh, f"exec {shlex.join(argv)}"]

    def connecting(self, host: str, port: int) -> list[str]:
        """What to start on this machine so that its stdin and stdout are a TCP connection that the board
        makes to ``host``, as it knows it."""
        *options, end, address = self._ssh
        return [*options, "-W", f"{host}:{port}", end, address]

    def run(self, argv: Sequence[str], stdin: str | None = None) -> str:
        """See :class:`~flowspec_edge.fleet.commands.Runner`."""
        return finish(self.where, argv[0], self.command(argv), stdin, self._timeout_s)


def runner_for(inventory: Inventory, device: DeviceEntry) -> Runner:
    """Runs commands on ``device``: here, if that is this machine, else over ssh."""
    return LocalRunner(device.name) if is_here(device) else SshRunner(inventory, device)


def python_for(inventory: Inventory, device: DeviceEntry) -> str:
    """The Python interpreter for :func:`runner_for`: if that is this machine, the one that runs this."""
    return sys.executable if is_here(device) else inventory.python(device)


def is_here(device: DeviceEntry) -> bool:
    """Whether ``device`` is this machine: one of its interfaces has the address."""
    return is_own(resolve(device))


def is_own(address: str) -> bool:
    """Whether one of this machine's interfaces has ``address``; False for a name that is unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
