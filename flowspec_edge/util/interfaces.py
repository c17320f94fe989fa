"""The machine's network interfaces.

Sent to boards with the probe: standard library only, Python 3.8.
"""

from __future__ import annotations

import glob
import os
import socket
import struct
from collections.abc import Iterator

# Of linux/rtnetlink.h and linux/if_addr.h.
_DUMP_ADDRESSES, _NEW_ADDRESS, _DONE, _ERROR = 22, 20, 3, 2
_REQUEST_ALL = 0x301
_ADDRESS, _LOCAL = 1, 2  # of a point-to-point link, ADDRESS is the other end's
_HEAD, _ABOUT, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_MOST_BYTES = 1 << 17


def ipv4_addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface that has some, further ones of an interface included.

    The kernel's own list: whether a socket can be bound to an address says nothing under the sysctl
    ``ip_nonlocal_bind``.
    """
    addresses: dict[str, list[str]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        about = _ABOUT.pack(socket.AF_INET, 0, 0, 0, 0)
        kernel.send(_HEAD.pack(_HEAD.size + len(about), _DUMP_ADDRESSES, _REQUEST_ALL, 1, 0) + about)
        is_done = False
        while not is_done:
            for kind, body in _pieces(kernel.recv(_MOST_BYTES), _HEAD):
                is_done = is_done or kind in (_DONE, _ERROR)
                if kind == _NEW_ADDRESS and body[0] == socket.AF_INET:
                    name, address = _address(body)
                    addresses.setdefault(name, []).append(address)
    return addresses


def _address(body: bytes) -> tuple[str, str]:
    index = _ABOUT.unpack_from(body)[-1]
    parts = dict(_pieces(body[_ABOUT.size:], _ATTRIBUTE))
    try:
        name = socket.if_indextoname(index)
    except OSError:  # it has gone meanwhile
        name = str(index)
    return name, socket.inet_ntoa(parts[_LOCAL] if _LOCAL in parts else parts[_ADDRESS])


def _pieces(data: bytes, head: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """(type, contents) of messages or attributes, whose heads begin with their length and their type."""
    while len(data) >= head.size:
        size, kind = head.unpack_from(data)[:2]
        if size < head.size:
            return
        yield kind, data[head.size:size]
        data = data[(size + 3) // 4 * 4:]


def is_inside_the_machine(interface: str) -> bool:
    """Return whether it is a bridge without a network card, such as Docker's docker0.

    Such a bridge has the same address on many machines.
    """
    devices = "/sys/class/net"
    try:
        ports = os.listdir(f"{devices}/{interface}/brif")
    except OSError:
        return False
    return not any(os.path.exists(f"{devices}/{port}/device") or glob.glob(f"{devices}/{port}/lower_*")
                   for port in ports)
