"""The power of a board fails during the first `up`, and right after one: it boots with a whole release, and the next
`up` completes.  During later commands: test_deploy_under_fault.py, and at every step fault_matrix.py.

The tests follow one another: each finds the cluster as the one before it left it.  Two boards; what a board
had not synced when its power failed is lost (``kits.power_cuts``).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kits import board_images, container_boards
from kits.deployments import PATIENCE, PROMPT, Cluster
from kits.power_cuts import PowerFleet, power_fleet
from kits.requests import continued

from flowspec_edge.boards import paths
from flowspec_edge.model.opened import resolve_model

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

COUNT = 8
DRAFT, STAGE = 0, 1  # the boards
UNITS = (paths.DRAFT_UNIT, paths.verify_unit(1))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PowerFleet]:
    with power_fleet(tmp_path_factory.mktemp("power"), 2) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(fleet: PowerFleet, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(fleet, tmp_path_factory.mktemp("cluster"))


@contextmanager
def interrupted(fleet: PowerFleet, cluster: Cluster, when: str, name: str, pattern: str) -> Iterator[None]:
    """`up` to where the stage's board begins or has ended the program ``name``; the block is what happens then, and
    makes it fail with one line."""
    fleet.hold(STAGE, when, name, pattern)
    line = [sys.executable, "-m", "flowspec_edge.cli.main", "deploy", "up", "--json", "--cluster"]
    with subprocess.Popen(fleet.command([*line, str(cluster.file)]), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          cwd=board_images.REPOSITORY) as running:
        fleet.held(STAGE, running)
        yield
        said, complaint = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1
    assert "Traceback" not in complaint
    assert said or complaint.startswith("flowspec: error: ")
    assert fleet.name(STAGE) in said + complaint


def whole(fleet: PowerFleet, board: int) -> str:
    """The release that is the board's after it has booted; no file of it is empty."""
    current = fleet.shell(board, f"readlink {paths.CURRENT}").strip()
    assert fleet.shell(board, f"find {current}/ {paths.UNITS}/flowspec-* -type f -size 0") == ""
    return current.rpartition("/")[2]


def runs_whole(fleet: PowerFleet, board: int) -> str:
    """The same; and its service is up."""
    assert fleet.shell(board, f"systemctl is-active {UNITS[board]} || true").strip() == "active"
    return whole(fleet, board)


def both_fail(fleet: PowerFleet, names: bool) -> None:
    """Both boards' power fails, and is back: the draft device boots until a token comes through the stage."""
    for board in (DRAFT, STAGE):
        fleet.cut_power(board, names)
    for board in (DRAFT, STAGE):
        fleet.start(board, wait=False)
    fleet.wait_ready()


def completes(cluster: Cluster) -> str:
    """The release that `up` brings about, and that answers as plain decoding does."""
    told = cluster.deploy("up")
    assert told["ok"], told["problems"] or told
    assert cluster.tokens("--max-new-tokens", str(COUNT)) == continued(resolve_model("demo"), PROMPT, COUNT)[0]
    release: str = told["release"]
    return release


@pytest.mark.core
def test_a_power_cut_loses_what_was_not_synced(fleet: PowerFleet) -> None:
    """Else the tests below could not fail."""
    write = "mkdir -p /srv/cut && cd /srv/cut && head -c 99999 /dev/zero > "
    fleet.shell(STAGE, f"{write} kept; sync -f kept; {write} lost; {write} lost.new; mv lost.new moved")
    fleet.cut_power(STAGE)
    fleet.start(STAGE)
    assert fleet.shell(STAGE, "cd /srv/cut; stat -c %s kept lost moved").split() == ["99999", "0", "0"]
    fleet.shell(STAGE, f"{write} unknown; rm kept")
    fleet.cut_power(STAGE, names=False)
    fleet.start(STAGE)
    assert fleet.shell(STAGE, "cd /srv/cut; ls").split() == ["kept", "lost", "moved"]
    fleet.shell(STAGE, "rm -r /srv/cut")


FIRST = (
    ("wheels", "before", "sha256sum", "--check*"),
    ("environment", "before", "sudo", "*board_key?make*"),
    ("shard", "before", "sudo", "*/releases/*.partial*"),
    ("release", "after", "mv", "-T?*.partial*"),
    ("units", "after", "systemctl", "daemon-reload"),
    ("current", "after", "mv", f"-T?{paths.CURRENT}.new*"),
)


@pytest.mark.parametrize("moment", [
    pytest.param(moment, id=moment[0], marks=pytest.mark.core if moment[0] == "release" else ()) for moment in FIRST])
def test_during_the_first_up(fleet: PowerFleet, cluster: Cluster, moment: tuple[str, str, str, str]) -> None:
    """Each goes on where the one before was cut off."""
    with interrupted(fleet, cluster, *moment[1:]):
        fleet.cut_power(STAGE)
    fleet.start(STAGE)
    if moment[0] == "current":
        whole(fleet, STAGE)


@pytest.mark.parametrize("names", [False, pytest.param(True, marks=pytest.mark.core)])
def test_right_after_success(fleet: PowerFleet, cluster: Cluster, names: bool) -> None:
    """Then the new release runs again by itself."""
    cluster.write(context=512 + 64 * names)
    release = completes(cluster)
    both_fail(fleet, names)
    assert cluster.becomes_ready()["release"] == release
    assert [runs_whole(fleet, board) for board in (DRAFT, STAGE)] == [release] * 2
    assert completes(cluster) == release
    assert cluster.deploy("up")["changed"] == 0
