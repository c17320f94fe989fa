"""A board's own key pair: as a program, run as on a board."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec_edge.boards.services import board_key
from flowspec_edge.errors import UsageError
from flowspec_edge.transport import keys


def run(action: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flowspec_edge.boards.services.board_key", action, str(path)],
                          capture_output=True, text=True, check=False)


def test_the_program_tells_the_public_half_alone(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "board.key"
    lost = run("show", path)
    assert (lost.returncode, lost.stdout) == (2, "")
    assert lost.stderr == f"cannot read the key file {path}: No such file or directory\n"
    made = run("make", path)
    pair = keys.load(path)
    assert json.loads(made.stdout) == {"public": pair.public.decode(), "changed": True, "before": None}
    assert pair.secret.decode() not in made.stdout + made.stderr
    assert path.stat().st_mode & 0o777 == 0o400
    again = run("make", path)
    assert json.loads(again.stdout) == {"public": pair.public.decode(), "changed": False, "before": None}
    assert [file.name for file in path.parent.iterdir()] == ["board.key"]


def test_a_change_is_settled_or_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "board.key"
    with pytest.raises(UsageError, match="cannot read the key file"):
        board_key.rotate(path)
    assert board_key.make(path)
    first = keys.load(path)
    assert not board_key.undo(path)
    for _ in range(2):  # the second rotation follows one that was not settled: no other board knows its key
        assert board_key.rotate(path)
        assert keys.load(path) != first
        assert keys.load(tmp_path / "board.key.old") == first
    assert board_key.undo(path)
    assert keys.load(path) == first
    board_key.rotate(path)
    second = keys.load(path)
    assert board_key.settle(path)
    assert not board_key.settle(path)
    assert keys.load(path) == second
    assert path.stat().st_mode & 0o777 == 0o400
    assert [file.name for file in tmp_path.iterdir()] == ["board.key"]


def test_what_is_no_key_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "board.key"
    path.write_text("mine")
    path.chmod(0o400)
    done = run("make", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{path} is not a key file; make a new one\n"
    assert path.read_text() == "mine"
