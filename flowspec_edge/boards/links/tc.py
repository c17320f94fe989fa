"""``tc`` commands that limit what a device sends.

One HTB root class of the link's rate has two classes: data, and a priority class for the control channel and
ssh.  Only HTB and u32 filters, because kernels of small boards lack most others.  Egress only: for both
directions, shape both ends.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from flowspec_edge.boards.commands import SBIN, Runner
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.jetson import system

HANDLE = "f5ec:"  # identifies flowspec's root qdisc
_TOTAL, _FIRST, _DATA = (HANDLE + minor for minor in ("1", "10", "20"))

_FIRST_SHARE = 0.05  # of the rate, guaranteed for the priority class
_QUANTUM = 18_000  # bytes per class and round: two jumbo frames
# Burst: what HTB may send at once after a pause.  HTB charges a packet when it leaves, so a packet may exceed
# the bucket, which only compensates for a late timer.  With a larger one the first part of every segment,
# of some hundred kilobytes, would pass at full speed.
_TIMER_LATENESS_S = 120e-6
_MIN_BURST_BYTES = 1600


def commands(interface: str, mbps: float, protected_ports: Iterable[int]) -> list[list[str]]:
    """Return the commands that shape an ``interface`` without flowspec's root qdisc.

    mbps  10^6 bit/s of Ethernet frames, no FCS

    ARP and TCP from or to ``protected_ports`` have priority and may use the whole rate.
    """
    return [["tc", "qdisc", "replace", "dev", interface, "root", "handle", HANDLE, "htb", "default", "20"],
            *rate_commands(interface, mbps), *_filters(interface, protected_ports)]


def rate_commands(interface: str, mbps: float) -> list[list[str]]:
    """Change the rate of the root qdisc of ``commands`` without a gap."""
    if not 0.1 <= mbps <= 1e5:
        raise UsageError(f"a link cannot be shaped to {mbps:g} Mbps: 0.1 to 100000 is possible")
    rate = round(mbps * 1e6)
    first = round(rate * _FIRST_SHARE)
    burst = f"{max(_MIN_BURST_BYTES, round(rate / 8 * _TIMER_LATENESS_S))}b"

    def class_of(parent: str, name: str, guaranteed: int, *priority: str) -> list[str]:
        return ["tc", "class", "replace", "dev", interface, "parent", parent, "classid", name, "htb",
                "rate", f"{guaranteed}bit", "ceil", f"{rate}bit", "burst", burst, "cburst", burst,
                "quantum", str(_QUANTUM), *priority]

    return [class_of(HANDLE, _TOTAL, rate), class_of(_TOTAL, _FIRST, first, "prio", "0"),
            class_of(_TOTAL, _DATA, rate - first, "prio", "1")]


def _filters(interface: str, protected_ports: Iterable[int]) -> list[list[str]]:
    add = ["tc", "filter", "add", "dev", interface, "parent", HANDLE]
    commands = [[*add, "protocol", "arp", "prio", "3", "u32", "match", "u32", "0", "0", "flowid", _FIRST]]
    for port in protected_ports:
        for protocol, prio, family in (("ip", "1", "ip"), ("ipv6", "2", "ip6")):
            commands += [[*add, "protocol", protocol, "prio", prio, "u32", "match", family, side, str(port),
                          "0xffff", "flowid", _FIRST] for side in ("sport", "dport")]
    return commands


def removal(interface: str, then: Sequence[str] = ()) -> str:
    """Return shell text that removes flowspec's root qdisc, if present, and then runs ``then``."""
    device = shlex.quote(interface)
    after = f"; {shlex.join(then)}" if then else ""
    return (f"if tc qdisc show dev {device} root | grep -q '^qdisc htb {HANDLE} '; "
            f"then tc qdisc del dev {device} root{after}; fi")


def script(lines: Iterable[Sequence[str] | str]) -> str:
    """Join commands, as argv or shell text, for ``sh -es``, which stops at the first failure."""
    text = [line if isinstance(line, str) else shlex.join(line) for line in lines]
    return "\n".join([f"PATH=$PATH:{SBIN}", "export LC_ALL=C", *text, ""])


def check_kernel(runner: Runner, root: Sequence[str] = ()) -> None:
    """Raise FlowspecError, with the next step, if ``commands`` do not work on the device."""
    try:
        try_kernel(runner, root)
    except FlowspecError as error:
        raise FlowspecError(f"{error} (tried to shape a link: {requirements()})") from error


def try_kernel(runner: Runner, root: Sequence[str] = ()) -> None:
    """Raise FlowspecError in the tool's words if ``commands`` fail in a temporary network namespace."""
    runner.run([*root, "unshare", "--net", "--", "sh", "-es"], stdin=script(commands("lo", 100.0, [1])))


def requirements() -> str:
    """Return what shaping needs, and how to install it on a Jetson."""
    modules = system().kernel_module
    names = [module.name for module in modules]
    options = " and ".join(f"{module.option}=m" for module in modules)
    return (f"that needs root, Debian's iproute2 and util-linux, and a kernel with {' and '.join(names)}, "
            "which that of Jetson Linux may lack: take the kernel sources of the board's release (NVIDIA's "
            f"Jetson Linux archive), set {options}, build and install the modules, then sudo depmod -a && "
            f"sudo modprobe -a {' '.join(names)}")
