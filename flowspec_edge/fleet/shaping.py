"""Slowing down what a device sends: what ``tc`` is told, as data.

Knows the shape: one HTB root with a class of the link's rate, in it a class for data and one that
goes first, for the control channel and ssh.  Does not know when it is applied, nor how a device is
brought back (``shaping_device``).

Only HTB and u32 filters are used, for kernels of small boards lack most of the rest.  Egress only:
a link is slow in both directions when the devices at both its ends are shaped.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.commands import SBIN, Runner

HANDLE = "f5ec:"  # of our root qdisc; by it a leftover is known as ours
_TOTAL, _FIRST, _DATA = (HANDLE + minor for minor in ("1", "10", "20"))

_FIRST_SHARE = 0.05  # of the rate, guaranteed to the priority class
_QUANTUM = 18_000  # bytes a class may send in its turn: two jumbo frames
# What HTB may send at once after a pause.  A bucket is charged for a packet when it may go, so none
# need fit; the bucket only makes up for the timer's being late.  More than that would let the first
# part of every segment pass at full speed, and a segment is only some hundred kilobytes.
_LATE_S = 120e-6
_BURST_BYTES = 1600


def commands(interface: str, mbps: float, protected_ports: Iterable[int]) -> list[list[str]]:
    """Shape ``interface``, whose root qdisc is not ours yet, to ``mbps`` (10^6 bits a second).

    The rate counts Ethernet frames without their checksum, as tc does.  Traffic from or to one of
    ``protected_ports`` (TCP), and ARP, goes before the rest and may use the whole rate.
    """
    return [["tc", "qdisc", "replace", "dev", interface, "root", "handle", HANDLE, "htb", "default", "20"],
            *rate_commands(interface, mbps), *_filters(interface, protected_ports)]


def rate_commands(interface: str, mbps: float) -> list[list[str]]:
    """Set the rate of a root qdisc that :func:`commands` has made, without a gap."""
    if not 0.1 <= mbps <= 1e5:
        raise UsageError(f"a link cannot be shaped to {mbps:g} Mbps: 0.1 to 100000 is possible")
    rate = round(mbps * 1e6)
    first = round(rate * _FIRST_SHARE)
    burst = f"{max(_BURST_BYTES, round(rate / 8 * _LATE_S))}b"

    def class_of(parent: str, name: str, guaranteed: int, *priority: str) -> list[str]:
        return ["tc", "class", "replace", "dev", interface, "parent", parent, "classid", name, "htb",
                "rate", f"{guaranteed}bit", "ceil", f"{rate}bit", "burst", burst, "cburst", burst,
                "quantum", str(_QUANTUM), *priority]

    return [class_of(HANDLE, _TOTAL, rate), class_of(_TOTAL, _FIRST, first, "prio", "0"),
            class_of(_TOTAL, _DATA, rate - first, "prio", "1")]


def _filters(interface: str, protected_ports: Iterable[int]) -> list[list[str]]:
    add = ["tc", "filter", "add", "dev", interface, "parent", HANDLE]
    found = [[*add, "protocol", "arp", "prio", "3", "u32", "match", "u32", "0", "0", "flowid", _FIRST]]
    for port in protected_ports:
        for protocol, prio, family in (("ip", "1", "ip"), ("ipv6", "2", "ip6")):
            found += [[*add, "protocol", protocol, "prio", prio, "u32", "match", family, side, str(port),
                       "0xffff", "flowid", _FIRST] for side in ("sport", "dport")]
    return found


def removal(interface: str, then: Sequence[str] = ()) -> str:
    """Shell text that takes our root qdisc away, if it is there, and runs ``then``.

    The kernel puts its default where the qdisc was.
    """
    device = shlex.quote(interface)
    after = f"; {shlex.join(then)}" if then else ""
    return (f"if tc qdisc show dev {device} root | grep -q '^qdisc htb {HANDLE} '; "
            f"then tc qdisc del dev {device} root{after}; fi")


def script(lines: Iterable[Sequence[str] | str]) -> str:
    """Commands, as argv or as shell text, for ``sh -es``: the first that fails ends it."""
    text = [line if isinstance(line, str) else shlex.join(line) for line in lines]
    return "\n".join([f"PATH=$PATH:{SBIN}", "export LC_ALL=C", *text, ""])


def check_kernel(runner: Runner, root: Sequence[str] = ()) -> None:
    """FlowspecError if the device's kernel or tools cannot do what :func:`commands` wants.

    Tried in a network namespace that ends with the trial, so that nothing on the device is touched.
    ``root``: what makes a command run as root.
    """
    trial = script(commands("lo", 100.0, [1]))
    try:
        runner.run([*root, "unshare", "--net", "--", "sh", "-es"], stdin=trial)
    except FlowspecError as error:
        raise FlowspecError(f"{error} (tried out how links are shaped: that needs root, a kernel with "
                            "sch_htb and cls_u32, and Debian's iproute2 and util-linux)") from error
