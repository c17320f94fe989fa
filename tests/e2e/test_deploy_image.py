"""A cluster whose boards have Docker and no torch: the image is sent, runs under systemd, and goes again.

Docker and systemd are real; the boards compute on their CPUs, and what --runtime=nvidia does is not seen here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kits import container_boards, docker_boards
from kits.deployments import PROMPT, Cluster
from kits.requests import continued

from flowspec_edge.boards import paths
from flowspec_edge.model.opened import resolve_model

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

CONTAINER = "flowspec-verify-1"
# A user's own settings of the unit: less memory, and less patience than half a minute.
_DROP_IN = r"[Service]\nMemoryMax=3G\nWatchdogSec=10\nTimeoutAbortSec=2\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("docked")
    docker_boards.write_image(directory / "image.tar", directory / "wheelhouse")
    with closing(docker_boards.DockerFleet(tmp_path_factory.mktemp("boards"))) as fleet:
        yield Cluster(fleet, directory, runtime="image")


def test_an_image_has_the_life_of_an_environment(cluster: Cluster) -> None:
    fleet = cluster.fleet
    unit = paths.verify_unit(1)
    fleet.shell(1, f"mkdir /etc/systemd/system/{unit}.d; printf '{_DROP_IN}' > /etc/systemd/system/{unit}.d/own.conf")
    plan, told = cluster.deploy("plan"), cluster.deploy("up")
    assert told["ok"], told
    assert [board["steps"] for board in told["boards"]] == [board["steps"] for board in plan["boards"]]
    expected, _ = continued(resolve_model("demo"), PROMPT, 16)
    assert cluster.tokens("--max-new-tokens", "16", "--temperature", "0") == expected

    # Sent and loaded once; what runs is left alone, and its ports are its own.
    before = cluster.deploy("status")
    assert before["ok"], before
    assert cluster.deploy("up")["changed"] == 0
    assert cluster.deploy("status")["boards"] == before["boards"]
    assert fleet.shell(1, f"ls {paths.HOME}").split() == ["current", "releases", "venvs", "wheels"]

    # The container has the service's user, and writes to nothing but the cache and what its launcher reads.
    told_of = json.loads(fleet.shell(1, f"docker inspect {CONTAINER}"))[0]
    assert told_of["HostConfig"]["ReadonlyRootfs"]
    assert told_of["HostConfig"]["Memory"] == 3 << 30
    assert {mount["Source"]: mount["RW"] for mount in told_of["Mounts"]} == {
        "/opt/flowspec": False, "/var/lib/flowspec": False, "/var/cache/flowspec": True, f"/run/{CONTAINER}": True,
        f"/run/{CONTAINER}/credentials": False}
    processes = fleet.shell(1, f"docker top {CONTAINER} -eo pid,user,args").splitlines()[1:]
    assert {line.split()[1] for line in processes} == {paths.USER}
    assert "flowspec: serving demo" in cluster.flowspec("deploy", "logs", "board-0").stdout
    assert cluster.flowspec("doctor", "--json").stdout.count('"check": "docker"') == 2
    keys = json.loads(cluster.flowspec("keys", "show", "--json").stdout)["boards"]
    assert all(board["public"] == board["recorded"] and board["error"] is None for board in keys)

    # A process that dies is restarted; a stuck one by systemd's watchdog, which its own loop feeds.
    fleet.shell(1, f"docker kill --signal KILL {CONTAINER}")
    _restarted(cluster, 1)
    fleet.shell(1, f"docker pause {CONTAINER}")
    _restarted(cluster, 2)

    # Stopped in good order: no container is left, and the service did not fail.
    assert cluster.deploy("stop")["ok"]
    assert fleet.shell(1, f"docker ps --all --quiet; systemctl is-failed {unit} || true").split() == ["inactive"]
    assert cluster.deploy("start")["ok"]

    # Another release of the same image, and the way back.
    first = before["release"]
    cluster.write(runtime="image", context=640)
    told = cluster.deploy("up")
    assert told["ok"], told
    assert told["release"] != first
    assert not any(step["changed"] for board in told["boards"] for step in board["steps"]
                   if step["name"] in ("image sent", "image", "environment"))
    assert cluster.deploy("rollback")["ok"]
    assert cluster.becomes_ready()["release"] == first
    assert cluster.tokens("--max-new-tokens", "16", "--temperature", "0") == expected

    assert cluster.deploy("down", "--purge")["ok"]
    assert fleet.shell(1, "docker images --quiet; docker ps --all --quiet; ls -d /opt/flowspec 2>&1 || true").endswith(
        "No such file or directory\n")


def _restarted(cluster: Cluster, times: int) -> None:
    unit = paths.verify_unit(1)
    cluster.fleet.shell(1, f"until [ $(systemctl show -P NRestarts {unit}) = {times} ]; do sleep 0.2; done")
    cluster.becomes_ready()


def test_what_a_board_or_an_image_lacks_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    fleet = cluster.fleet
    cluster.write(runtime="image", torch_device="cuda")
    assert [problem for problem in cluster.deploy("plan")["problems"] if "nvidia" in problem]
    cluster.write(runtime="image")
    with fleet.changed(1, "systemctl stop docker.socket docker; mv /usr/bin/docker /srv/",
                       "mv /srv/docker /usr/bin/; systemctl start docker.socket docker"):
        [problem] = cluster.deploy("plan")["problems"]
    assert problem.startswith("board-1: docker: there is no docker; sudo apt-get install -y docker.io")
    shutil.copy(cluster.file.parent / "image.tar", tmp_path / "image.tar")
    with (tmp_path / "image.tar").open("r+b") as archive:
        archive.truncate(1000)
    cluster.write(runtime="image", image=str(tmp_path / "image.tar"))
    done = cluster.flowspec("deploy", "plan")
    assert done.returncode == 2
    assert "image.tar is no image that docker save has written (no tar, or cut off)" in done.stderr.splitlines()[-1]
