"""The screen of a rollout, told of it by several boards at once."""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from flowspec_edge.boards.deploy.actions import BoardOutcome, Step
from flowspec_edge.boards.deploy.rollout_log import DeployReport
from flowspec_edge.cli.deploy.rollout_output import RolloutProgress, print_report
from flowspec_edge.cli.main import main
from flowspec_edge.errors import FlowspecError


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


@pytest.mark.parametrize("command", ["up", "rollback", "down"])
def test_one_command_at_a_time_changes_a_cluster(command: str, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """A process holds the lock, and is killed."""
    boards = [f'[[device]]\nname = "{role}"\naddress = "127.0.0.{place}"\nssh_port = 1\nrole = "{role}"\n'
              for place, role in enumerate(("draft", "verify"), start=2)]
    file, lock = tmp_path / "cluster.toml", tmp_path / ".flowspec" / "bed" / "lock"
    file.write_text('[cluster]\nname = "bed"\nmodel = "demo"\ninterface = "lo"\n' + "".join(boards))
    holder = ("import sys; from pathlib import Path; from flowspec_edge.util.files import locked\n"
              "with locked(Path(sys.argv[1]), 'busy'): print('held', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", holder, str(lock)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"held\n"
        assert main(["deploy", command, "--cluster", str(file)]) == 2
        assert "another flowspec command is changing cluster bed: wait" in capsys.readouterr().err
        running.kill()
    assert main(["deploy", command, "--cluster", str(file)]) == 1
    assert "port 1" in capsys.readouterr().err  # the boards do not answer
