"""`flowspec deploy up` where something is wrong with a board: it says so, and nothing has been touched."""

from __future__ import annotations

import pytest
from kits import container_boards
from kits.deployments import Cluster

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]


# How something comes to be wrong with board 3, and how it goes; and words that tell of it.  What else may be wrong:
# test_misfortunes.py, and tests/boards/probe.
FAULTS = {
    "no sudo": ("mv /etc/sudoers.d/jetson /srv", "mv /srv/jetson /etc/sudoers.d", "sudo", "cannot become root"),
    "port taken": ("systemd-run --unit=other python3 -m http.server 7702", "systemctl stop other",
                   "port", "7702 is taken by python3"),
}


@pytest.mark.parametrize("name", [pytest.param("no sudo", marks=pytest.mark.core), "port taken"])
def test_what_is_wrong_is_said_before_any_board_is_touched(cluster: Cluster, name: str) -> None:
    fleet, (breaks, mends, check, words) = cluster.fleet, FAULTS[name]
    if cluster.deploy("status")["release"]:
        assert cluster.deploy("down", "--purge")["ok"]
    with fleet.changed(3, breaks, mends):
        told = cluster.deploy("up")
    [problem] = told["problems"]
    assert problem.startswith(f"board-3: {check}: ")
    assert words in problem
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
