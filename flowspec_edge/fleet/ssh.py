"""Commands on a board, through the system's OpenSSH client.

Knows ssh's options and how a board of the inventory is reached.  Does not know what is run there.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from flowspec_edge.fleet.commands import LocalRunner, Runner, finish
from flowspec_edge.fleet.desired import Reach
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.fleet.openssh import is_own, openssh


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
