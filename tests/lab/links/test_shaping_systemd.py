"""The restoring timer under a real systemd, booted in a container of this machine's own files."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits import network_beds

from flowspec_edge.boards.commands import LocalRunner, Runner
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.links.shaping import STATE, DeviceShaping

PATIENCE = 60.0
TOOLS = (("systemd-nspawn", "systemd-container"), ("/lib/systemd/systemd", "systemd"))
WHY_NOT = network_beds.why_no_bed() or next(
    (f"{tool} is missing (Debian package {package})" for tool, package in TOOLS
     if shutil.which(tool) is None), "")
pytestmark = [pytest.mark.soak, network_beds.needs("a container with a systemd of its own", WHY_NOT)]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Runs commands in a booted container: what it writes is in memory, and its network is its own."""
    directory = tmp_path_factory.mktemp("box")
    root = directory / "root"
    root.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, (directory / "log").open("wb") as log:
        notices.bind(str(directory / "notices"))
        notices.settimeout(PATIENCE)
        with subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", "unshare", "--mount", "--", "sh", "-c",
                 f"mount --bind / {root} && exec systemd-nspawn -D {root} --volatile=overlay --boot "
                 "--notify-ready=yes --register=no --keep-unit --private-network "
                 "--capability=CAP_NET_ADMIN --machine=flowspec-test systemd.unit=sysinit.target"],
                env={**os.environ, "NOTIFY_SOCKET": str(directory / "notices")},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log) as container:
            try:
                told: dict[str, str] = {}
                while "READY" not in told or "X_NSPAWN_LEADER_PID" not in told:
                    told |= dict(line.split("=", 1) for line in notices.recv(4096).decode().splitlines()
                                 if "=" in line)
                runner = LocalRunner("box", ["nsenter", "-t", told["X_NSPAWN_LEADER_PID"], "-a", "--"])
                runner.run(["ip", "link", "add", "eth9", "type", "veth", "peer", "name", "eth8"])
                yield runner
            finally:
                container.terminate()


def shown(box: Runner) -> str:
    return box.run(["tc", "qdisc", "show", "dev", "eth9"])


def timers(box: Runner) -> list[str]:
    text = box.run(["systemctl", "list-units", "--type=timer", "--plain", "--no-legend", "flowspec-*"])
    return [line.split()[0] for line in text.splitlines()]


def test_armed_renewed_and_cancelled(box: Runner) -> None:
    before = shown(box)
    with DeviceShaping(box, "eth9", [22]) as link:
        assert shown(box) == before
        assert [name[-8:] for name in timers(box)] == ["-1.timer"]
        link.apply(100)
        link.apply(50)
        assert [name[-8:] for name in timers(box)] == ["-3.timer"]
        assert "htb f5ec:" in shown(box)
    assert shown(box) == before
    assert timers(box) == []
    assert box.run(["ls", STATE]) == ""


def test_the_timer_restores_the_link(box: Runner) -> None:
    before = shown(box)
    with subprocess.Popen(box.command(["tc", "monitor"]), stdout=subprocess.PIPE, text=True) as events:
        assert events.stdout is not None
        try:
            with DeviceShaping(box, "eth9", [22], restore_after_s=5) as link:
                link.apply(100)
                said = ""
                while "deleted qdisc htb f5ec:" not in said:
                    assert select.select([events.stdout], [], [], PATIENCE)[0], "nothing was restored"
                    said = events.stdout.readline()
                box.run(["sh", "-c", f"while [ -e {STATE}/eth9 ]; do :; done"])  # its last act
                with pytest.raises(FlowspecError, match=r"box: .* its shaping was not renewed for 5 s"):
                    link.apply(50)
        finally:
            events.terminate()
    assert shown(box) == before
    assert timers(box) == []


def test_a_restoration_by_hand_leaves_no_timer(box: Runner) -> None:
    before = shown(box)
    one, next_one = DeviceShaping(box, "eth9", [22]), DeviceShaping(box, "eth9", [22])
    one.start()
    box.run(["sh", f"{STATE}/eth9/restore"])
    with next_one as link:
        link.apply(100)
        one.restore()
        assert len(timers(box)) == 1  # the next run's
        assert "htb f5ec:" in shown(box)
    assert shown(box) == before
    assert timers(box) == []


def test_the_host_is_unchanged(box: Runner) -> None:
    assert "eth9" not in network_beds.interfaces()
    assert not Path(STATE, "eth9").exists()
