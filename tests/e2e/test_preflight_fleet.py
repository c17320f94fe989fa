"""What the preflight finds out by a transient unit, on boards with a real systemd."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from kits import container_boards
from kits.deployments import Cluster

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

BOARD = 2
# Runs at the control place: a board's facts, and what the preflight makes of them.
_ASK = """
import dataclasses, json, sys
from pathlib import Path
from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.boards.probe.checks import Needs, preflight
found = preflight(load_inventory(Path(sys.argv[1])), {sys.argv[2]: Needs()})
torch = dataclasses.asdict(found.facts[sys.argv[2]].system.torch)
print(json.dumps([torch, [str(problem) for problem in found.problems]]))
"""
TORCH = "/usr/local/lib/python3.11/dist-packages/torch"


@pytest.fixture(scope="module")
def file(fleet: container_boards.Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fleet.write_cluster(tmp_path_factory.mktemp("preflight") / "cluster.toml")


def ask(fleet: container_boards.Fleet, file: Path) -> tuple[dict[str, Any], list[str]]:
    done = fleet.run([sys.executable, "-c", _ASK, str(file), fleet.name(BOARD)], container_boards.PATIENCE)
    assert not done.returncode, done.stderr
    torch, problems = json.loads(done.stdout)
    return torch, problems


@pytest.mark.core
def test_torch_is_tried_as_a_service_will_use_it(fleet: container_boards.Fleet, file: Path) -> None:
    torch, problems = ask(fleet, file)
    assert problems == []
    assert (torch["unit"], torch["outside"]) == ("user nobody, groups video, render", None)
    assert torch["file"] == f"{TORCH}/__init__.py"
    assert torch["why"] == torch["numpy_fault"] == ""


def test_the_trial_has_all_protections_of_the_units(fleet: container_boards.Fleet, file: Path) -> None:
    """A torch that writes down what its process may do, against the protections that the unit file names."""
    spy = ("import json, os; from pathlib import Path as P; s = dict(l.split(':', 1) for l in "
           "P('/proc/self/status').read_text().splitlines()); "
           "raise OSError(json.dumps([s['CapBnd'].strip(), s['NoNewPrivs'].strip(), s['Seccomp'].strip(), "
           "os.getuid() != 0, os.access('/home/jetson', os.R_OK), os.access('/usr', os.W_OK), "
           "os.access('/proc/1/stat', os.R_OK), sorted(os.listdir('/tmp'))]))")
    plant = f"mkdir /run/spy; printf '%s' \"{spy}\" > /run/spy/__init__.py; mount --bind /run/spy {TORCH}"
    with fleet.changed(BOARD, f"touch /tmp/of-others; {plant}", f"umount {TORCH}; rm -r /run/spy /tmp/of-others"):
        torch, _ = ask(fleet, file)
    assert torch["outside"]["why"] != torch["why"]
    capabilities, no_new, seccomp, unprivileged, home, writable, others, temporary = json.loads(
        torch["why"].removeprefix("OSError: "))
    assert int(capabilities, 16) == 0
    assert (no_new, seccomp, unprivileged) == ("1", "2", True)
    assert (home, writable, others, temporary) == (False, False, False, [])


def test_a_torch_that_only_root_can_read(fleet: container_boards.Fleet, file: Path) -> None:
    with fleet.changed(BOARD, f"chmod 700 {TORCH}", f"chmod 755 {TORCH}"):
        torch, [problem] = ask(fleet, file)
    assert torch["outside"]["version"]
    assert problem.startswith(f"board-2: torch: {torch['outside']['version']} works as root, but not with "
                              "the service's protections (user nobody, groups video, render): ")
    assert f"let every user read {TORCH}/__init__.py" in problem


def test_a_rebuilt_torch_needs_room_for_an_environment(cluster: Cluster) -> None:
    """On the stage of two boards, whose card has no room for a second one."""
    fleet, stage = cluster.fleet, cluster.fleet.name(1)
    cluster.write()
    cluster.file.write_text("\n[[device]]".join(cluster.file.read_text().split("\n[[device]]")[:3]) + "\n")
    assert cluster.deploy("up")["ok"]
    used = int(fleet.shell(1, "du -sm /opt/flowspec").split()[0])
    assert used < 500
    record = fleet.shell(1, "ls /usr/local/lib/python3.11/dist-packages/torch-*.dist-info/RECORD").strip()
    fleet.shell(1, f"cp {record} /srv/RECORD; echo torch/lib/other.so,sha256=x,1 >> {record}")
    try:
        fleet.shell(1, f"mkdir /run/card; mount -t tmpfs -o size={used + 100}m tmpfs /run/card; "
                       "cp -a /opt/flowspec/. /run/card; mount --bind /run/card /opt/flowspec")
        told = cluster.deploy("up")
        [problem] = told["problems"]
        assert problem.startswith(f"{stage}: disk: /opt/flowspec needs 0.50 GB, 0.1")
        assert told["changed"] == 0
    finally:
        fleet.shell(1, f"mv /srv/RECORD {record}; umount /opt/flowspec /run/card; rmdir /run/card")
        cluster.deploy("down", "--purge")
        cluster.write()
