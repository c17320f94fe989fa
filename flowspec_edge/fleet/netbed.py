"""Devices on this machine, each with a network of its own and links as slow as wanted.

Knows network namespaces, the bridge between them and how a thread or a process gets inside.  Does
not know what runs there.

Every namespace is anonymous.  It lives as long as a process is in it, and the one that holds it is
a ``cat`` whose standard input is a pipe of ours: when this process ends, by ``kill -9`` too, the
pipe closes, ``cat`` ends, and the kernel takes the namespace with its interfaces.  Nothing has a
name under /run/netns, and nothing is ever made in the machine's own namespace.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet import shaping
from flowspec_edge.fleet.commands import LocalRunner, missing_tools, search_path

_TOOLS = (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux"))
_INTERFACE = "eth0"
_MOST_STAGES = 64
_MTU = 1500
# Frames carry 52 bytes of headers and options that TCP's payload is less than the MTU, and 14 more
# that tc counts.  A profile's rate, which virtual time charges, is that of the payload.
_WIRE_SHARE = (_MTU + 14) / (_MTU - 52)
# Segments that TCP may hand on as one packet: as many as spare the processor at 1000 Mbps.  With the
# kernel's own 64 KiB a message of 128 KiB would be two packets, and the first always goes at once.
_GSO_SEGMENTS = 12
_GRACE_S = 2.0  # for a holder to end
_CLONE_NEWNET = 0x40000000


class NetBed:
    """Place 0 is D0's device, 1…``stages`` are the stages'; all are on one switch.

    ``control_port`` is free in every namespace, and goes before the data when links are shaped.
    """

    control_port = 7701

    def __init__(self, stages: int) -> None:
        """Make the namespaces and join them.

        UsageError, before anything is made, if this process may not or this machine cannot.
        """
        if not 1 <= stages <= _MOST_STAGES:
            raise UsageError(f"a bed has 1 to {_MOST_STAGES} stages, not {stages}")
        check_machine()
        self._places = stages + 1
        self._shaped = False
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(self._places + 1):  # the last one is the switch
                self._holders.append(_held_namespace())
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> int:
        """How many devices there are, D0's included."""
        return self._places

    def address(self, place: int) -> str:
        """The IPv4 address of a device."""
        return f"10.77.0.{self._checked(place) + 1}"

    def interface(self, place: int) -> str:
        """The network interface of a device, which has that address."""
        self._checked(place)
        return _INTERFACE

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        """What to run for ``command`` to run on that device, as the same process: nsenter becomes it."""
        return self._inside(self._checked(place), command)

    @contextmanager
    def entered(self, place: int) -> Iterator[None]:
        """The calling thread is on that device inside the block, and so are threads started there.

        Sockets stay where they were made.  ZeroMQ makes them in threads of its context: so make the
        context, and the first socket of it, inside.
        """
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            target = os.open(self._namespace(self._checked(place)), os.O_RDONLY | os.O_CLOEXEC)
            try:
                _set_namespace(target)
            finally:
                os.close(target)
            try:
                yield
            finally:
                _set_namespace(before)
        finally:
            os.close(before)

    def shape(self, mbps: float | None) -> None:
        """Every device sends at ``mbps`` (10^6 bits of TCP payload a second); None: as fast as it can."""
        if mbps is None:
            lines: list[Sequence[str]] = [["tc", "qdisc", "del", "dev", _INTERFACE, "root"]]
            if not self._shaped:
                return
        elif self._shaped:
            lines = [*shaping.rate_commands(_INTERFACE, mbps * _WIRE_SHARE)]
        else:
            lines = [*shaping.commands(_INTERFACE, mbps * _WIRE_SHARE, [self.control_port])]
        for place in range(self._places):
            self._script(place, lines)
        self._shaped = mbps is not None

    def close(self) -> None:
        """Let the namespaces go; processes inside keep theirs until they end.  Safe to call twice."""
        for holder in self._holders:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.close()
            holder.stdout.close()
        for holder in self._holders:
            try:
                holder.wait(_GRACE_S)
            except subprocess.TimeoutExpired:  # a fork of this process holds the pipe, too
                holder.kill()
                holder.wait()
        self._holders = []

    def __enter__(self) -> NetBed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _join(self) -> None:
        """A bridge in the last namespace, and a cable from each of the others to it."""
        switch = self._places
        lines = ["ip link add switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
                 f"ip link set switch mtu {_MTU} up"]
        for place in range(self._places):
            # The far end is made in the device's namespace, not moved there.
            lines += [f"ip link add port{place} mtu {_MTU} type veth peer name {_INTERFACE} "
                      f"mtu {_MTU} netns {self._holders[place].pid}",
                      f"ip link set port{place} master switch up"]
        self._script(switch, lines)
        for place in range(self._places):
            self._script(place, ["ip link set lo up",
                                 f"ip address add {self.address(place)}/24 dev {_INTERFACE}",
                                 f"ip link set {_INTERFACE} gso_max_segs {_GSO_SEGMENTS} up"])

    def _script(self, place: int, lines: Sequence[Sequence[str] | str]) -> None:
        runner = LocalRunner(f"device {place} of the bed" if place < self._places else "the bed's switch",
                             self._inside(place, []))
        runner.run(["sh", "-es"], shaping.script(lines))

    def _inside(self, place: int, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self._namespace(place)}", "--", *command]

    def _namespace(self, place: int) -> str:
        return f"/proc/{self._holders[place].pid}/ns/net"

    def _checked(self, place: int) -> int:
        if not self._holders:
            raise FlowspecError("the bed is closed; make a new one")
        if not 0 <= place < self._places:
            raise UsageError(f"the bed has places 0 to {self._places - 1}, not {place}")
        return place


def check_machine() -> None:
    """UsageError if this process may not make a bed, or this machine cannot."""
    if missing := missing_tools(_TOOLS):
        raise UsageError(f"real links on this machine need {', '.join(missing)}: install it")
    if os.geteuid() != 0:
        raise UsageError("real links on this machine are network namespaces, which only root may make: "
                         "run this with sudo, or in virtual time")
    try:
        shaping.check_kernel(LocalRunner())
    except FlowspecError as error:
        raise UsageError(str(error)) from error


def _held_namespace() -> subprocess.Popen[bytes]:
    """A process in a new network namespace, which ends when its standard input does."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "PATH": search_path()},
        start_new_session=True)  # Ctrl-C is for us
    assert holder.stdout is not None
    if not holder.stdout.read(1):  # it is inside as soon as it writes
        holder.communicate()
        raise FlowspecError(f"unshare could not make a network namespace (exit code {holder.returncode})")
    return holder


def _set_namespace(descriptor: int) -> None:
    """Put the calling thread into the network namespace that ``descriptor`` is open on."""
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise FlowspecError(f"cannot enter the network namespace: {os.strerror(number)}")


_libc = ctypes.CDLL(None, use_errno=True)
