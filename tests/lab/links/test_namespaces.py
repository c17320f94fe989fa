"""Testbeds of network namespaces: their links' rates, priorities, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from multiprocessing import connection
from pathlib import Path
from statistics import median

import pytest
from kits import network_beds

from flowspec_edge.boards.links.linktest import measure_link, round_trips
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.links import namespaces
from flowspec_edge.lab.links.namespaces import NetnsTestbed

PORT, OTHER_PORT = 7000, 7002
PATIENCE_S = 60.0  # only a failing test waits so long


@pytest.fixture
def bed() -> Iterator[NetnsTestbed]:
    with NetnsTestbed(1) as bed:
        yield bed


@network_beds.needs_netns
def test_links_have_the_rate_they_are_shaped_to(bed: NetnsTestbed) -> None:
    for mbps in (125, 1000):
        bed.shape(mbps)
        # A busy processor slows a link down, or reads the first message late, which makes it look faster.
        for _ in range(8):
            with network_beds.serving(bed, 1, PORT, 1), bed.entered(0):
                found = measure_link(bed.address(1), PORT, 0.3).mbps
            if found == pytest.approx(mbps, rel=0.1):
                break
        assert found == pytest.approx(mbps, rel=0.1)


@network_beds.needs_netns
def test_every_device_is_shaped_and_unshaped(bed: NetnsTestbed) -> None:
    bed.shape(None)
    bed.shape(50)
    with network_beds.serving(bed, 0, PORT, 4):
        with bed.entered(1):  # the other way; a busy processor may make one of three look faster
            slow = min(measure_link(bed.address(0), PORT, 0.4).mbps for _ in range(3))
        bed.shape(None)
        with bed.entered(1):
            fast = measure_link(bed.address(0), PORT, 0.2).mbps
    assert slow < 55
    assert fast > 2 * slow


def beside_data(bed: NetnsTestbed) -> tuple[float, float, float]:
    """The median round trips in s on another port and on the control port while data fills a link, and the
    data's Mbps."""
    with (network_beds.serving(bed, 1, PORT, 1), network_beds.serving(bed, 1, bed.control_port, 1),
          network_beds.serving(bed, 1, OTHER_PORT, 1)):
        rate = []

        def saturate() -> None:
            with bed.entered(0):
                rate.append(measure_link(bed.address(1), PORT, 2.5).mbps)

        data = threading.Thread(target=saturate)
        with bed.entered(0):
            data.start()
            plain: list[float] = []
            control: list[float] = []
            while data.is_alive():  # the queue needs a moment to build up: most of the time it is there
                plain += round_trips(bed.address(1), OTHER_PORT, 4)
                control += round_trips(bed.address(1), bed.control_port, 4)
            data.join()
            for port in (OTHER_PORT, bed.control_port):  # lets the peers end
                measure_link(bed.address(1), port, 0.05)
    return median(plain), median(control), rate[0]


@network_beds.needs_netns
def test_the_control_port_does_not_wait_behind_data(bed: NetnsTestbed) -> None:
    bed.shape(100)
    for _ in range(5):  # waits for a busy processor are in all three figures
        plain, control, rate = beside_data(bed)
        if control < 0.5 * plain and 50 < rate < 110:
            break
    assert control < 0.5 * plain
    assert 50 < rate < 110


@network_beds.needs_netns
def test_only_the_thread_and_the_command_are_inside(bed: NetnsTestbed) -> None:
    here = os.readlink("/proc/thread-self/ns/net")
    with bed.entered(1):
        inside = os.readlink("/proc/thread-self/ns/net")
        with socket.create_server((bed.address(1), bed.control_port)):  # the address is there
            with bed.entered(0):
                assert os.readlink("/proc/thread-self/ns/net") not in (here, inside)
                with socket.create_connection((bed.address(1), bed.control_port), 5):
                    pass
            assert os.readlink("/proc/thread-self/ns/net") == inside
    with pytest.raises(ZeroDivisionError), bed.entered(1):
        raise ZeroDivisionError
    assert os.readlink("/proc/thread-self/ns/net") == here

    with subprocess.Popen(bed.command(1, ["cat"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"x")
        child.stdin.flush()
        assert child.stdout.read(1) == b"x"
        assert os.readlink(f"/proc/{child.pid}/ns/net") == inside
        status = Path(f"/proc/{child.pid}/status").read_text()
        assert f"PPid:\t{os.getpid()}\n" in status
        assert "Name:\tcat\n" in status
    assert bed.interface(1) in subprocess.run(
        bed.command(1, ["ip", "-o", "address"]), capture_output=True, text=True, check=True).stdout


@network_beds.needs_netns
def test_nothing_stays_after_close_nor_after_an_exception() -> None:
    before = (network_beds.interfaces(), network_beds.named_namespaces())
    bed = NetnsTestbed(3)
    pids = [holder.pid for holder in bed._holders]
    with network_beds.holding_namespaces_of(pids) as made:
        assert len(made) == 5  # four devices and a switch
        assert (network_beds.interfaces(), network_beds.named_namespaces()) == before  # not even meanwhile
        bed.close()
        bed.close()
        assert not made & network_beds.inhabited()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(FlowspecError, match="closed"):
        bed.command(0, ["true"])

    with ExitStack() as held:
        with suppress(ZeroDivisionError), NetnsTestbed(1) as bed:
            made = held.enter_context(network_beds.holding_namespaces_of([holder.pid for holder in bed._holders]))
            raise ZeroDivisionError
        assert not made & network_beds.inhabited()
    assert (network_beds.interfaces(), network_beds.named_namespaces()) == before


_HOLDS_A_BED = """
import sys
from flowspec_edge.lab.links.namespaces import NetnsTestbed
with NetnsTestbed(2) as bed:
    bed.shape(100)
    print(*(holder.pid for holder in bed._holders), flush=True)
    sys.stdin.read()
"""


@network_beds.needs_netns
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_when_the_process_is_killed(number: signal.Signals) -> None:
    before = (network_beds.interfaces(), network_beds.named_namespaces())
    with subprocess.Popen([sys.executable, "-c", _HOLDS_A_BED], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          preexec_fn=network_beds.heed_ctrl_c) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4
        with network_beds.holding_namespaces_of(pids) as made:
            ends = [os.pidfd_open(pid) for pid in pids]
            parent.send_signal(number)
            parent.wait(PATIENCE_S)
            for end in ends:
                assert connection.wait([end], PATIENCE_S), "a process of the bed outlives it"
                os.close(end)
            assert not made & network_beds.inhabited()
    assert (network_beds.interfaces(), network_beds.named_namespaces()) == before


@network_beds.needs_netns
@pytest.mark.parametrize("stages", [0, 65])
def test_numbers_of_stages_out_of_range(stages: int) -> None:
    with pytest.raises(UsageError, match="1 to 64 stages"):
        NetnsTestbed(stages)


@network_beds.needs_netns
def test_wrong_places_and_rates(bed: NetnsTestbed) -> None:
    with pytest.raises(UsageError, match="no device 2: its devices are 0 to 1"):
        bed.address(2)
    with pytest.raises(UsageError, match="0 Mbps"):
        bed.shape(0)


def test_missing_tools_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flowspec_edge.boards.commands.SBIN", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"ip \(Debian package iproute2\).*nsenter \(.*util-linux\)"):
        namespaces.check_machine()


@network_beds.needs_netns
def test_an_ordinary_user_is_refused() -> None:
    code = ("import os\n"
            "from flowspec_edge.lab.links.namespaces import NetnsTestbed\n"
            "from flowspec_edge.errors import UsageError\n"
            "os.setuid(65534)\ntry: NetnsTestbed(1)\nexcept UsageError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "only root" in done.stdout, done.stderr
