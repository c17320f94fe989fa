"""The system's OpenSSH client, as every command to a board uses it.

Knows ssh's options, and which addresses need no ssh.  Does not know the inventory, nor what is run.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from flowspec_edge.fleet.desired import Reach

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


def is_own(address: str) -> bool:
    """Whether one of this machine's interfaces has ``address``; False for a name that is unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
