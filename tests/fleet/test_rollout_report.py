"""What a rollout came to: in its books, as a person reads it, and as a program does."""

from __future__ import annotations

import json

import pytest
import typer

from flowspec_edge.cli.deploy_show import conclude
from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.desired import BoardState, Outcome, Phase, Reach, Step
from flowspec_edge.fleet.rollout_books import Books
from flowspec_edge.fleet.rollout_report import Report, Watch


def outcome(board: str, *changed: str, error: str = "") -> Outcome:
    return Outcome(board, [Step(board, "looked at", changed=False),
                           *(Step(board, name, changed=True) for name in changed)], error)


GOOD = Report([outcome("a", "key", "shards"), outcome("b")], "r1", seconds=3.2)
BAD = Report([outcome("a"), outcome("b", error="b: running: out of memory")], "r2", "r1",
             "release r1 runs again on all boards")


def test_programs_get_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    conclude(GOOD, "deployed", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["changed"], told["release"], told["seconds"]) == (True, 2, "r1", 3.2)
    assert [board["changed"] for board in told["boards"]] == [2, 0]
    with pytest.raises(typer.Exit) as ended:
        conclude(BAD, "deployed", as_json=True)
    assert ended.value.exit_code == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["rolled_back"], told["boards"][1]["error"]) == (
        False, "r1", "b: running: out of memory")


def test_people_get_a_line_a_board_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    conclude(GOOD, "deployed", as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "a: 2 changed: key, shards", "b: no change", "deployed in 3 s: 2 changes; release r1"]
    conclude(GOOD, "deployed", as_json=False, dry_run=True)
    assert capsys.readouterr().out.splitlines() == ["a: 2 to change: key, shards", "b: no change"]
    conclude(Report([outcome("a")]), "deployed", as_json=False, dry_run=True)
    assert capsys.readouterr().out.splitlines() == ["a: no change", "nothing would change"]


def test_a_failure_says_how_it_left_the_boards(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FlowspecError, match=r"^b: running: out of memory; release r1 runs again on all"):
        conclude(BAD, "deployed", as_json=False)
    with pytest.raises(FlowspecError, match=r"^2 things are in the way; what runs on the boards was left"):
        conclude(Report([outcome("a")], problems=["a: disk: full", "b: ssh: silent"]), "deployed", False)
    assert capsys.readouterr().err.splitlines() == ["  a: disk: full", "  b: ssh: silent"]


def test_an_engine_that_is_lost_is_a_failure_of_its_boards() -> None:
    """And not the end of the command, which has something to take back."""
    phase: Phase = "nonsense"  # type: ignore[assignment]
    books = Books(["idle", "here"], Watch())
    books.book(Step("here", "key", changed=True))
    assert not books.run(phase, [BoardState("here", Reach("127.0.0.1"))], "nonsense", dry_run=True)
    assert books.error("idle") == ""
    assert books.error("here").startswith("here: the provisioning process ended before here was done: Key")
    report = books.report()
    assert (report.ok, report.changed) == (False, 1)


def test_what_going_back_came_to_is_added() -> None:
    books, back = Books(["a", "b"], Watch()), Books(["a", "b"], Watch())
    books.book(Step("a", "running", changed=False), "a: running: broken")
    for board in ("a", "b"):
        back.book(Step(board, "current release", changed=True))
        back.book(Step(board, "running", changed=False), f"{board}: running: lost")
    books.add(back, "going back")
    assert books.error("a") == "a: running: broken; going back: a: running: lost"
    assert books.error("b") == "going back: b: running: lost"
    assert books.report().changed == 2
