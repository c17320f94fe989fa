"""The provisioning engine over a real ssh, looking only: the boards' files are this machine's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sshkit

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.desired import BoardState, Phase, Reach, Step
from flowspec_edge.fleet.engine import run


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshkit.Boards]:
    with sshkit.boards(2, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards


def wanted(boards: sshkit.Boards, place: int) -> BoardState:
    reach = Reach(boards.bed.address(place), user="root", key=f"{boards.directory}/user",
                  config=f"{boards.directory}/config")
    return BoardState(f"board-{place}", reach, release="never-there", unit="flowspec-verify@1.service",
                      files={"release.json": "{}\n"})


@sshkit.needs_boards
def test_a_board_that_cannot_be_reached_says_why_and_holds_up_no_other(boards: sshkit.Boards,
                                                                       tmp_path: Path) -> None:
    good = wanted(boards, 0)
    nobody = replace(good, name="no-sshd", reach=replace(good.reach, port=1))
    stranger = replace(good, name="stranger", reach=replace(good.reach, key=f"{boards.directory}/stranger"))
    strange = tmp_path / "config"
    strange.write_text("UserKnownHostsFile /dev/null\nGlobalKnownHostsFile /dev/null\n"
                       "StrictHostKeyChecking yes\n")
    unknown = replace(good, name="unknown", reach=replace(good.reach, config=str(strange)))
    nowhere = replace(good, name="nowhere", reach=replace(good.reach, address="nowhere.invalid"))
    told: list[tuple[str, str]] = []
    steps: list[Step] = []
    states = [nobody, good, stranger, unknown, nowhere, wanted(boards, 1)]
    outcomes = {outcome.board: outcome for outcome in run(
        "release", states, dry_run=True, on_step=steps.append, on_error=lambda *error: told.append(error))}
    assert list(outcomes) == [state.name for state in states]
    for name in ("board-0", "board-1"):
        assert outcomes[name].error == ""
        assert outcomes[name].steps == [Step(name, "release", True)]
    assert not Path("/opt/flowspec/releases/never-there").exists()
    for name, words in (("stranger", "Permission denied"), ("unknown", "Host key verification failed"),
                        ("nowhere", "Could not resolve hostname nowhere.invalid")):
        assert outcomes[name].error.startswith("connect: "), outcomes[name].error
        assert words in outcomes[name].error
        assert outcomes[name].steps == []
    assert outcomes["no-sshd"].error.startswith("connect: connect to host")
    assert dict(told) == {name: outcome.error for name, outcome in outcomes.items() if outcome.error}
    assert sorted(step.board for step in steps) == ["board-0", "board-1"]


@sshkit.needs_boards
def test_a_caller_who_stops_leaves_no_connection(boards: sshkit.Boards) -> None:
    """Ctrl-C comes up in the caller, between two events."""
    def interrupt(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("release", [wanted(boards, 0), wanted(boards, 1)], dry_run=True, on_step=interrupt)
    for place in (0, 1):
        assert boards.left(place, "sshd: root") == 0


def local() -> BoardState:
    """This machine, which needs no ssh."""
    return BoardState("here", Reach("127.0.0.1"), release="never-there", files={"release.json": "{}\n"})


def test_a_process_that_dies_is_one_clear_line() -> None:
    phase: Phase = "nonsense"  # type: ignore[assignment]
    with pytest.raises(FlowspecError, match="ended before here was done: KeyError: 'nonsense'"):
        run(phase, [local()], dry_run=True)


def test_a_process_that_says_something_else_is_one_clear_line(tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('Welcome to this machine!')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(FlowspecError, match="nobody understands: Welcome to this machine!"):
        run("release", [local()], dry_run=True)


def test_without_pyinfra_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyinfra", None)
    with pytest.raises(UsageError, match=r"pip install 'flowspec-edge\[deploy\]'"):
        run("release", [local()], dry_run=True)


def test_whoever_runs_the_engine_stays_free_of_gevent() -> None:
    code = ("import sys, flowspec_edge.fleet.engine\n"
            "print([name for name in ('gevent', 'pyinfra', 'paramiko') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
