"""The rule that links beyond loopback must be encrypted, without ZeroMQ for the command line's sake."""

from __future__ import annotations

import ipaddress


def beyond_loopback(endpoint: str) -> bool:
    """Whether other machines can reach ``endpoint``; only tcp://host:port is reachable at all."""
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or host in ("localhost", "lo"):
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface, or * for all of them
        return True


def unencrypted_bind_problem(endpoint: str) -> str:
    """Why ``endpoint`` needs encryption; empty on loopback."""
    if not beyond_loopback(endpoint):
        return ""
    return (f"{endpoint} is beyond loopback, where links have to be encrypted: give it keys, or, on a "
            "network that you trust, set unencrypted = true")
