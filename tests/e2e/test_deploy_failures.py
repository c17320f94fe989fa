"""`flowspec deploy up` where something is wrong with a board: it says so, and nothing has been touched."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from kits import container_boards
from kits.deployments import Cluster

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]


@dataclass(frozen=True)
class Fault:
    """Something wrong with board 3: how it comes about and goes, and words that tell of it."""

    name: str
    breaks: str
    mends: str
    says: tuple[str, ...]


FAULTS = (
    Fault("no ssh", "systemctl stop ssh", "systemctl start ssh", ("ssh", "nothing answers at port 22")),
    Fault("wrong key", "mv ~jetson/.ssh/authorized_keys /srv", "mv /srv/authorized_keys ~jetson/.ssh",
          ("ssh", "does not let this user in")),
    Fault("no sudo", "mv /etc/sudoers.d/jetson /srv", "mv /srv/jetson /etc/sudoers.d",
          ("sudo", "cannot become root")),
    Fault("disk full", "mkdir /opt/flowspec; mount -t tmpfs -o size=50m tmpfs /opt/flowspec",
          "umount /opt/flowspec; rmdir /opt/flowspec", ("disk", "are free")),
    Fault("port taken", "systemd-run --unit=other python3 -m http.server 7702", "systemctl stop other",
          ("port", "7702 is taken by python3")),
    # The machine's memory cannot be taken away from one container: it is told that there is less.
    Fault("too little memory", "sed 's/^MemAvailable:.*/MemAvailable: 99999 kB/' /proc/meminfo > /run/less; "
          "mount --bind /run/less /proc/meminfo", "umount /proc/meminfo", ("memory", "are needed")),
)

@pytest.mark.parametrize("fault", [
    pytest.param(fault, id=fault.name, marks=pytest.mark.core if fault.name == "no sudo" else ())
    for fault in FAULTS])  # what each is told from is a rule with facts of its own: tests/boards/probe
def test_what_is_wrong_is_said_before_any_board_is_touched(cluster: Cluster, fault: Fault) -> None:
    fleet = cluster.fleet
    if cluster.deploy("status")["release"]:
        assert cluster.deploy("down", "--purge")["ok"]
    fleet.shell(3, fault.breaks)
    try:
        told = cluster.deploy("up")
    finally:
        fleet.shell(3, fault.mends)
    [problem] = told["problems"]
    assert problem.startswith(f"board-3: {fault.says[0]}: ")
    assert fault.says[1] in problem
    assert told["changed"] == 0
    for board in range(fleet.boards):
        assert fleet.shell(board, "ls /opt /var/lib | grep -c flowspec || true").strip() == "0"


def test_a_part_that_is_half_copied_is_completed(cluster: Cluster) -> None:
    assert cluster.deploy("up")["ok"]
    parts = "find /var/lib/flowspec/models -name '*.safetensors' -size +8k"
    assert cluster.fleet.shell(3, f"{parts} -print -exec truncate -s 4096 {{}} +")
    told = cluster.deploy("up")
    assert told["ok"], told
    assert {board["name"] for board in told["boards"] if board["changed"]} <= {"board-3", "board-0"}
    assert not cluster.fleet.shell(3, "find /var/lib/flowspec/models -name '*.safetensors' -size -5k")
    assert cluster.becomes_ready()
