"""Testbed of network namespaces: devices on this machine, connected by shaped links.

Every namespace is anonymous and held by a ``cat`` whose stdin is a pipe of this process: when this process
ends, even by ``kill -9``, ``cat`` ends and the kernel removes the namespace.  Nothing is created under
/run/netns or in the machine's own namespace.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from flowspec_edge.boards.commands import LocalRunner, end_process, missing_tools, search_path
from flowspec_edge.boards.links import tc
from flowspec_edge.boards.links.linktest import LinkMeasure, measure_link, serve_link
from flowspec_edge.errors import FlowspecError, UsageError, ended

_TOOLS = (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux"))
_INTERFACE = "eth0"
_MAX_STAGES = 64
_MTU = 1500
# 52 bytes of the MTU are headers and options, and tc counts 14 more per frame.  A profile's rate, used by
# virtual time, is of payload.
_WIRE_SHARE = (_MTU + 14) / (_MTU - 52)
# GSO segments per packet: enough to save CPU at 1000 Mbps.  With the kernel's default of 64 KiB, a 128 KiB
# message would be two packets, the first of which is always sent at once.
_GSO_SEGMENTS = 12
_TIMEOUT_S = 30.0  # of one measurement
_CLONE_NEWNET = 0x40000000


class NetnsTestbed:
    """Devices on one switch: D0 at place 0, the stages at 1…``stages``.

    ``control_port`` is free in every namespace, and has priority on shaped links.
    """

    control_port = 7701

    def __init__(self, stages: int) -> None:
        """Raise UsageError, before anything is created, if this process lacks the rights or this machine a tool."""
        if not 1 <= stages <= _MAX_STAGES:
            raise UsageError(f"a testbed has 1 to {_MAX_STAGES} stages, not {stages}")
        check_machine()
        self._places = stages + 1
        self._shaped = False
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(self._places + 1):  # the last is the switch
                self._holders.append(_start_namespace())
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> int:
        return self._places

    def address(self, rank: int) -> str:
        return f"10.77.0.{self._checked(rank) + 1}"

    def interface(self, rank: int) -> str:
        self._checked(rank)
        return _INTERFACE

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return a command line that runs ``command`` on the device, in the same process (nsenter execs)."""
        return self._inside(self._checked(rank), command)

    @contextmanager
    def entered(self, rank: int) -> Iterator[None]:
        """Move the calling thread, and threads started in the block, to that device.

        Sockets stay where they were created.  Create a ZeroMQ context and its first socket inside: its
        threads create the sockets.
        """
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            target = os.open(self._namespace(self._checked(rank)), os.O_RDONLY | os.O_CLOEXEC)
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
        """Limit every device to ``mbps`` (10^6 bit/s of TCP payload); None: unshaped."""
        if mbps is None:
            lines: list[Sequence[str]] = [["tc", "qdisc", "del", "dev", _INTERFACE, "root"]]
            if not self._shaped:
                return
        elif self._shaped:
            lines = [*tc.rate_commands(_INTERFACE, mbps * _WIRE_SHARE)]
        else:
            lines = [*tc.commands(_INTERFACE, mbps * _WIRE_SHARE, [self.control_port])]
        for rank in range(self._places):
            self._script(rank, lines)
        self._shaped = mbps is not None

    def close(self) -> None:
        """Release the namespaces; processes inside keep theirs until they end.  Idempotent."""
        for holder in self._holders:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.close()
            holder.stdout.close()
        for holder in self._holders:
            end_process(holder)  # does not end by itself if a fork of this process holds the pipe
        self._holders = []

    def __enter__(self) -> NetnsTestbed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _join(self) -> None:
        """Make a bridge in the last namespace, with a veth pair to each of the others."""
        switch = self._places
        lines = ["ip link add switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
                 f"ip link set switch mtu {_MTU} up"]
        for rank in range(self._places):
            # Creates the far end directly in the device's namespace.
            lines += [f"ip link add port{rank} mtu {_MTU} type veth peer name {_INTERFACE} "
                      f"mtu {_MTU} netns {self._holders[rank].pid}",
                      f"ip link set port{rank} master switch up"]
        self._script(switch, lines)
        for rank in range(self._places):
            self._script(rank, ["ip link set lo up",
                                f"ip address add {self.address(rank)}/24 dev {_INTERFACE}",
                                f"ip link set {_INTERFACE} gso_max_segs {_GSO_SEGMENTS} up"])

    def _script(self, rank: int, lines: Sequence[Sequence[str] | str]) -> None:
        device_name = f"device {rank} of the testbed" if rank < self._places else "the testbed's switch"
        runner = LocalRunner(device_name, self._inside(rank, []))
        runner.run(["sh", "-es"], tc.script(lines))

    def _inside(self, rank: int, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self._namespace(rank)}", "--", *command]

    def _namespace(self, rank: int) -> str:
        return f"/proc/{self._holders[rank].pid}/ns/net"

    def _checked(self, rank: int) -> int:
        if not self._holders:
            raise FlowspecError("the testbed is closed; create a new one")
        if not 0 <= rank < self._places:
            raise UsageError(f"the testbed has no device {rank}: its devices are 0 to {self._places - 1}")
        return rank


def check_machine() -> None:
    """Raise UsageError if this process or machine cannot create a testbed."""
    if missing := missing_tools(_TOOLS):
        raise UsageError(f"real links on this machine need {', '.join(missing)}: install what is missing")
    if os.geteuid() != 0:
        raise UsageError("real links on this machine are network namespaces, which only root may create: "
                         "run this with sudo, or in virtual time")
    try:
        tc.check_kernel(LocalRunner())
    except FlowspecError as error:
        raise UsageError(str(error)) from error


def _start_namespace() -> subprocess.Popen[bytes]:
    """Return a process in a new network namespace, which ends at the end of its stdin."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "PATH": search_path()},
        start_new_session=True)  # Ctrl-C is for this process
    assert holder.stdout is not None
    # No deadline: unshare is one call to the kernel, which the shell's line or the end of its stdout follows.
    if not holder.stdout.read(1):  # it writes once it is inside
        holder.communicate()  # its stdout has ended, and it ends at the end of its stdin
        raise FlowspecError(f"unshare could not create a network namespace ({ended(holder.returncode)})")
    return holder


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise FlowspecError(f"cannot enter the network namespace: {os.strerror(number)}")


_libc = ctypes.CDLL(None, use_errno=True)


def measure_links(bed: NetnsTestbed, seconds: float = 0.4) -> list[LinkMeasure]:
    """Measure each device's link to the next (VN's: to D0), one after another, with data for ``seconds``."""
    return [_measured(bed, rank, (rank + 1) % bed.places, seconds) for rank in range(bed.places)]


def _measured(bed: NetnsTestbed, sender: int, receiver: int, seconds: float) -> LinkMeasure:
    port: Future[int] = Future()

    def serve() -> None:
        try:
            with bed.entered(receiver):
                serve_link(bed.address(receiver), 0, _TIMEOUT_S, 1, port.set_result)
        except BaseException as error:
            if port.done():
                raise
            port.set_exception(error)

    def measure() -> LinkMeasure:
        with bed.entered(sender):
            return measure_link(bed.address(receiver), port.result(_TIMEOUT_S), seconds)

    with ThreadPoolExecutor(2) as pool:
        serving, measuring = pool.submit(serve), pool.submit(measure)
        measurement = measuring.result()  # both ends have deadlines of their own
        serving.result()
    return measurement
