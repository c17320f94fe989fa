"""What a rollout came to: in its log, as a person reads it, and as a program does."""

from __future__ import annotations

import json

import pytest
import typer

from flowspec_edge.boards.deploy.actions import BoardOutcome, Step
from flowspec_edge.boards.deploy.rollout_log import DeployReport, RolloutLog, Watch
from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory
from flowspec_edge.cli.deploy.rollout_output import print_report
from flowspec_edge.errors import FlowspecError

INVENTORY = Inventory(cluster=ClusterSettings(name="lab"), device=[
    DeviceEntry(name="a", address="10.0.0.1", role="draft"), DeviceEntry(name="b", address="10.0.0.2",
                                                                         role="verify")])


def outcome(board: str, *changed: str, error: str = "") -> BoardOutcome:
    return BoardOutcome(board, [Step(board, "looked at", changed=False),
                                *(Step(board, name, changed=True) for name in changed)], error)


GOOD = DeployReport([outcome("a", "key", "shards"), outcome("b")], "r1", seconds=3.2)
BAD = DeployReport([outcome("a"), outcome("b", error="b: running: out of memory")], "r2", "r1",
                   "release r1 runs again on all boards")


def test_programs_get_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(GOOD, "deployed", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["changed"], told["release"], told["seconds"]) == (True, 2, "r1", 3.2)
    assert [board["changed"] for board in told["boards"]] == [2, 0]
    with pytest.raises(typer.Exit) as ended:
        print_report(BAD, "deployed", as_json=True)
    assert ended.value.exit_code == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["rolled_back"], told["boards"][1]["error"]) == (
        False, "r1", "b: running: out of memory")


def test_a_failure_says_how_it_left_the_boards(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FlowspecError, match=r"^b: running: out of memory; release r1 runs again on all"):
        print_report(BAD, "deployed", as_json=False)
    with pytest.raises(FlowspecError, match=r"^a: software: no room; running services were not changed"):
        print_report(DeployReport([outcome("a", error="a: software: no room")]), "deployed", as_json=False)
    capsys.readouterr()
    with pytest.raises(FlowspecError, match=r"^2 errors; no board was touched$"):
        print_report(DeployReport([outcome("a")], problems=["a: disk: full", "b: ssh: silent"]), "deployed",
                 as_json=False)
    said = capsys.readouterr()
    assert (said.err.splitlines(), said.out) == (["  a: disk: full", "  b: ssh: silent"], "")


def test_what_going_back_came_to_is_added() -> None:
    log, back = (RolloutLog(INVENTORY, ["a", "b"], Watch()) for _ in range(2))
    log.add_step(Step("a", "running", changed=False), "a: running: broken")
    for board in ("a", "b"):
        back.add_step(Step(board, "current release", changed=True))
        back.add_step(Step(board, "running", changed=False), f"{board}: running: lost")
    log.add(back, "going back")
    assert log.error("a") == "a: running: broken; going back: a: running: lost"
    assert log.error("b") == "going back: b: running: lost"
    assert log.report().changed == 2
