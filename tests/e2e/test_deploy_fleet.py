"""A cluster's whole life on five boards: from nothing to tokens, through losses and releases, to nothing.

The tests follow one another: each finds the cluster as the one before it left it, deployed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits import board_images, container_boards
from kits.deployments import PATIENCE, PROMPT, Cluster
from kits.requests import continued

from flowspec_edge.model.opened import resolve_model
from flowspec_edge.sampling.rule import Sampling

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

# Releases of the draft device that have made no token.
UNTRIED = "cd /opt/flowspec/releases; ls -d */untried 2>/dev/null || true"
COUNT = 24
# Of the boards' own system, whether something is deployed or not; sudo notes who has used it.
_FILES = ("find / -xdev ( -path /proc -o -path /sys -o -path /run -o -path /tmp -o -path /var/tmp "
          "-o -path /var/log -o -path /var/lib/systemd -o -name __pycache__ "
          "-o -name .sudo_as_admin_successful ) -prune -o -print")


@pytest.fixture(scope="module")
def bare(cluster: Cluster) -> list[set[str]]:
    """The files of every board before anything was deployed."""
    if cluster.deploy("status")["release"]:
        assert cluster.deploy("down", "--purge")["ok"]
    return [files(cluster, board) for board in range(cluster.fleet.boards)]


@pytest.fixture(scope="module")
def first(cluster: Cluster, bare: list[set[str]]) -> str:
    """The id of a release that has been deployed on bare boards."""
    cluster.write()
    plan = cluster.deploy("plan")
    told = cluster.deploy("up")
    assert told["ok"], told
    assert all(board["changed"] for board in told["boards"])
    assert steps(told) == steps(plan)
    release: str = told["release"]
    return release


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    """This source tree, but for a worker that ends as soon as a board starts it."""
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns(".*", "tests", "docs", "__pycache__", "build", "dist")
    shutil.copytree(board_images.REPOSITORY, tree, ignore=left_out)
    with (tree / "flowspec_edge/cli/serve/daemons.py").open("a") as worker:
        worker.write("\nimport os\nimport sys\n\n"
                     'if "NOTIFY_SOCKET" in os.environ:\n    sys.exit("broken on purpose")\n')
    yield tree
    shutil.rmtree(tree)


def steps(told: dict[str, Any]) -> dict[str, list[tuple[str, bool]]]:
    """The steps on each board, and whether each changes something."""
    return {board["name"]: [(step["name"], step["changed"]) for step in board["steps"]]
            for board in told["boards"]}


def files(cluster: Cluster, board: int) -> set[str]:
    return set(cluster.fleet.shell(board, _FILES.replace("(", r"\(").replace(")", r"\)")).splitlines())


ASKED = ("--max-new-tokens", str(COUNT), "--temperature")


def answers_as_plain_decoding_does(cluster: Cluster) -> None:
    """Sampled; the first test asks for the greedy text, too."""
    assert cluster.tokens(*ASKED, "1", "--seed", "3") == (
        continued(resolve_model("demo"), PROMPT, COUNT, Sampling(1.0, seed=3))[0])


@pytest.mark.core
def test_from_nothing_to_tokens(cluster: Cluster, first: str) -> None:
    status = cluster.deploy("status")
    assert (status["ok"], status["ready"], status["release"]) == (True, True, first)
    assert [board["role"] for board in status["boards"]] == ["draft", *["verify"] * 4]
    assert cluster.fleet.shell(0, UNTRIED) == ""
    assert cluster.tokens(*ASKED, "0") == continued(resolve_model("demo"), PROMPT, COUNT)[0]
    answers_as_plain_decoding_does(cluster)


def test_a_second_run_changes_nothing(cluster: Cluster, first: str) -> None:
    before = cluster.deploy("status")
    told = cluster.deploy("up")
    assert (told["ok"], told["changed"], told["release"]) == (True, 0, first), told
    assert cluster.deploy("plan")["changed"] == 0
    assert cluster.deploy("status")["boards"] == before["boards"]  # nothing was started anew


@pytest.mark.core
def test_a_worker_that_is_killed_is_back(cluster: Cluster, first: str) -> None:
    cluster.fleet.shell(2, "kill -KILL $(systemctl show -P MainPID flowspec-verify@2)")
    # systemd tells of the death before the status can say otherwise.
    restarts = "systemctl show -P NRestarts flowspec-verify@2"
    cluster.fleet.shell(2, f"until [ $({restarts}) = 1 ]; do sleep 0.2; done")
    status = cluster.becomes_ready()
    assert [board["restarts"] for board in status["boards"]][2] == 1
    answers_as_plain_decoding_does(cluster)


@pytest.mark.core
def test_services_are_stopped_started_and_read(cluster: Cluster, first: str) -> None:
    assert cluster.deploy("stop")["ok"]
    status = cluster.deploy("status")
    assert ({board["state"] for board in status["boards"]}, status["ready"]) == ({"inactive"}, False)
    assert cluster.deploy("start")["ok"]
    assert cluster.deploy("status")["ok"]  # a token has come through: nothing to wait for
    assert cluster.deploy("restart", "board-2")["ok"]
    cluster.becomes_ready()
    logs = cluster.flowspec("deploy", "logs", "board-0").stdout
    assert "flowspec: serving demo (flowspec_plus, 4 stages" in logs
    answers_as_plain_decoding_does(cluster)


@pytest.mark.parametrize("board", [3, pytest.param(0, marks=pytest.mark.core)])
def test_a_board_that_restarts_is_back(cluster: Cluster, first: str, board: int) -> None:
    cluster.fleet.reboot(board)
    assert cluster.becomes_ready()["release"] == first
    answers_as_plain_decoding_does(cluster)


def test_an_upgrade_and_the_way_back(cluster: Cluster, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.write(context=640, serve_host="0.0.0.0")
    plan = cluster.deploy("plan")
    told = cluster.deploy("up")
    assert told["ok"], told
    assert (steps(told), told["release"]) == (steps(plan), plan["release"])
    second = told["release"]
    assert second != first
    assert cluster.deploy("status")["release"] == second
    monkeypatch.setenv("FLOWSPEC_API_KEY", cluster.fleet.shell(0, "cat /etc/flowspec/api.key"))
    answers_as_plain_decoding_does(cluster)
    assert cluster.deploy("rollback")["ok"]
    assert cluster.becomes_ready()["release"] == first
    answers_as_plain_decoding_does(cluster)


@pytest.mark.core
def test_a_board_that_is_no_longer_used_stops(cluster: Cluster, first: str, tmp_path: Path) -> None:
    before = cluster.becomes_ready()["release"]
    done = cluster.fleet.flowspec("models", "shard", "--model", "demo", "--stages", "3", "--out",
                                  str(tmp_path / "three"), timeout=PATIENCE)
    assert not done.returncode, done.stderr
    cluster.write(model=str(tmp_path / "three"))
    cluster.file.write_text(cluster.file.read_text().replace('"verify"', '"auto"'))
    plan, told = cluster.deploy("plan"), cluster.deploy("up")
    assert told["ok"], told
    assert steps(told) == steps(plan)
    status = cluster.becomes_ready()
    assert [board["state"] for board in status["boards"]] == [*["active"] * 4, "absent"]
    answers_as_plain_decoding_does(cluster)
    assert cluster.deploy("up")["changed"] == 0
    assert cluster.deploy("rollback")["ok"]
    status = cluster.becomes_ready()
    assert [board["state"] for board in status["boards"]] == ["active"] * 5
    assert status["release"] == before
    answers_as_plain_decoding_does(cluster)


@pytest.mark.core
def test_a_broken_upgrade_is_taken_back(cluster: Cluster, first: str, broken: Path) -> None:
    cluster.write()
    before = cluster.becomes_ready()
    told = cluster.deploy("up", tree=broken)
    assert not told["ok"]
    assert told["release"] != before["release"] == told["rolled_back"]
    assert any("broken on purpose" in board["error"] for board in told["boards"]), told
    assert cluster.becomes_ready()["release"] == before["release"]
    assert cluster.fleet.shell(0, UNTRIED).split() == [f"{told['release']}/untried"]
    answers_as_plain_decoding_does(cluster)


@pytest.mark.core
def test_all_boards_get_other_keys(cluster: Cluster, first: str) -> None:
    before = json.loads(cluster.flowspec("keys", "show", "--json").stdout)["boards"]
    done = cluster.flowspec("keys", "rotate", "--json")
    assert not done.returncode, done.stderr
    after = json.loads(cluster.flowspec("keys", "show", "--json").stdout)["boards"]
    for old, new in zip(before, after, strict=True):
        assert new["public"] == new["recorded"] != old["public"]
        assert new["error"] is None
    refused = cluster.flowspec("deploy", "rollback")
    assert refused.returncode == 1
    assert "the keys were rotated since the release before this one" in refused.stderr, refused.stderr
    answers_as_plain_decoding_does(cluster)
    assert cluster.deploy("up")["changed"] == 0


@pytest.mark.core
def test_down_leaves_nothing(cluster: Cluster, first: str, bare: list[set[str]]) -> None:
    assert cluster.deploy("down", "--purge")["ok"]
    for board in range(cluster.fleet.boards):
        assert files(cluster, board) == bare[board]
        assert cluster.fleet.shell(board, "getent passwd flowspec || true; pgrep -u flowspec || true; "
                                          "systemctl list-units --all --no-legend 'flowspec*'") == ""
    assert not cluster.deploy("status")["ok"]


def test_a_first_release_that_is_broken_is_stopped(cluster: Cluster, bare: list[set[str]],
                                                   broken: Path) -> None:
    told = cluster.deploy("up", tree=broken)
    assert (told["ok"], told["rolled_back"]) == (False, None)
    assert all("broken on purpose" in board["error"] for board in told["boards"][1:]), told
    status = cluster.deploy("status")
    assert ({board["state"] for board in status["boards"]}, status["release"]) == ({"absent"}, None)
    assert cluster.deploy("down", "--purge")["ok"]
