"""The screen of a rollout, told of it by several boards at once."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from flowspec_edge.cli.deploy.rollout_output import RolloutProgress, print_report
from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.deploy.actions import BoardOutcome, Step
from flowspec_edge.fleet.deploy.rollout_log import DeployReport


def test_boards_tell_of_themselves_while_the_phase_changes() -> None:
    said = io.StringIO()
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=Console(file=said, width=100)) as progress:
        screen = RolloutProgress(progress)

        def tell(board: int) -> None:
            for count in range(50):
                screen.amount(f"board-{board}", count * 10**6, 49 * 10**6)
                screen.step(Step(f"board-{board}", f"step {count}", changed=True))
                if not board:
                    screen.phase(f"phase {count}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(tell, range(4)))
        screen.phase("the end")
        screen.amount("board-1", 10**6, 2 * 10**6)
    shown = said.getvalue().splitlines()
    assert [line.split() for line in shown] == [["the", "end"], ["board-1", "1", "of", "2", "MB"]]


@pytest.mark.parametrize("problems", [[], ["b: ssh: no; go there"]])
def test_notes_are_shown_whatever_comes_of_it(problems: list[str], capsys: pytest.CaptureFixture[str]
                                              ) -> None:
    note = "a: clock: -90000000 s against this machine's, and NTP has not set it; flowspec deploy up sets it"
    report = DeployReport([BoardOutcome("a"), BoardOutcome("b")], problems=problems, notes=[note])
    assert report.ok == (not problems)
    assert report.as_json()["notes"] == [note]
    if problems:
        with pytest.raises(FlowspecError, match="b: ssh: no"):
            print_report(report, "deployed", as_json=False)
    else:
        print_report(report, "deployed", as_json=False)
    assert capsys.readouterr().err == f"  note: {note}\n"
