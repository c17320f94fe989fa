"""What the tests of networks share: who may make a bed, and what the machine looks like."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing import connection
from pathlib import Path

import pytest

from flowspec_edge.boards.links.linktest import serve_link
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.links.namespaces import NetnsTestbed, check_machine


@cache
def why_no_bed() -> str:
    """Why this machine can make no bed; empty if it can."""
    try:
        check_machine()
    except FlowspecError as error:
        return str(error)
    return ""


def needs(what: str, why_not: str) -> pytest.MarkDecorator:
    """Leaves a test out where ``why_not`` says that its ground cannot be had: network namespaces are
    root's alone, and the suite has to run for other users, too, and without sshd.

    CI has all of it and sets FLOWSPEC_ALL_TESTS: there nothing is left out, and the test fails.
    """
    left_out = bool(why_not) and not os.environ.get("FLOWSPEC_ALL_TESTS")
    return pytest.mark.skipif(left_out, reason=f"{what}: {why_not}")


needs_netns = needs("a bed of network namespaces", why_no_bed())


def heed_ctrl_c() -> None:
    """For a process to be interrupted: what a shell starts in the background ignores SIGINT, and so
    would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interfaces() -> str:
    """The interfaces of the machine's own namespace."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return "\n".join(sorted(line.split(": ")[1] for line in links.splitlines()))


def named_namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def namespaces_of(pids: list[int]) -> set[str]:
    """The network namespaces of processes, as the kernel names them."""
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}


@contextmanager
def holding_namespaces_of(pids: list[int]) -> Iterator[set[str]]:
    """The same, held open: until the end of this no namespace that another test makes gets the number of one
    of these."""
    with ExitStack() as ends:
        held = [os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in pids]
        for namespace in held:
            ends.callback(os.close, namespace)
        yield {os.readlink(f"/proc/self/fd/{namespace}") for namespace in held}


def inhabited() -> set[str]:
    """Every network namespace that a process on this machine is in."""
    return {namespace for _, namespace in _processes()}


def _processes() -> Iterator[tuple[int, str]]:
    """Every process on this machine, and its network namespace."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # ended meanwhile
                yield int(entry.name), os.readlink(entry / "ns" / "net")


def made_by(pid: int) -> set[str]:
    """The network namespaces, other than ours, of a process' descendants."""
    parents: dict[int, int] = {}
    for member, _ in _processes():
        with suppress(OSError):
            parents[member] = int(Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    found = {namespace for member, namespace in _processes() if member in family}
    return found - {os.readlink("/proc/self/ns/net")}


@contextmanager
def serving(bed: NetnsTestbed, place: int, port: int, measurements: int) -> Iterator[None]:
    """A link's peer on a device of the bed, until it has answered so many measurements."""
    listens = threading.Event()

    def serve() -> None:
        with bed.entered(place):
            serve_link(bed.address(place), port, 60, measurements, lambda _: listens.set())

    thread = threading.Thread(target=serve)
    thread.start()
    assert listens.wait(60)
    yield
    thread.join(60)
    assert not thread.is_alive()


def processes_in(namespace: str) -> dict[int, str]:
    """The processes in a network namespace: their ids, and the commands with their arguments."""
    found = {}
    for pid, own in _processes():
        if own == namespace:
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def ended(pid: int, within: float) -> bool:
    """Whether a process ends in time."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(connection.wait([end], within))
    finally:
        os.close(end)
