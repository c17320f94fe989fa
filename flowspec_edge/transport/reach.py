"""Who can reach an endpoint, and that beyond this machine links are encrypted.

Knows how ZeroMQ writes TCP endpoints.  Does not know keys or sockets.
"""

from __future__ import annotations

import ipaddress


def beyond_loopback(endpoint: str) -> bool:
    """Whether others can reach a TCP ``endpoint``, such as tcp://host:port; what is no TCP stays here."""
    scheme, _, place = endpoint.partition("://")
    host = place.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or host in ("localhost", "lo"):
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface, or * for all of them
        return True


def why_not_open(endpoint: str) -> str:
    """What keeps a link at ``endpoint`` from being without encryption; "" on loopback."""
    if not beyond_loopback(endpoint):
        return ""
    return (f"{endpoint} is beyond loopback, where links have to be encrypted: give it keys, or, on a "
            "network that you trust, say so with unencrypted = true")
