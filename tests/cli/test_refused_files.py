"""Files and directories that the system refuses: one line that names the path, no traceback, nothing left
behind, and nothing computed before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kits.permissions import without_overrides

from flowspec_edge.cli.main import main

_LONG = "x" * 300  # a name has at most 255 bytes
Flowspec = Callable[..., tuple[int, str]]


@pytest.fixture
def flowspec(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Flowspec:
    """Runs a command in ``place``: its exit code, and what it says on stderr."""
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(place)
        capsys.readouterr()
        with without_overrides():
            code = main([*arguments])
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("mine")
    for name, mode in (("locked", 0o555), ("closed", 0o000)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    return tmp_path


TRAIN = ("models", "train-head", "--model", "demo", "--kind", "eagle2", "--quick")
INTO = "cannot write into the directory {}: Permission denied; give another "
DENIED = "Permission denied: see its permissions and those of its directories, or choose another place"
TOO_LONG = "File name too long: choose a shorter name"


@pytest.mark.parametrize(("command", "path", "code", "says"), [
    ((*TRAIN, "--out", "head", "--work"), "locked", 2, f"{INTO}--work"),
    ((*TRAIN, "--out"), _LONG, 1, f"cannot use {{}}/config.json: {TOO_LONG}"),
    (("models", "shard", "--model", "demo", "--stages", "2", "--out"), _LONG, 1,
     f"cannot use {{}}/manifest.json: {TOO_LONG}"),
    (("bench", "run", "--json"), _LONG, 2, "cannot write {}: File name too long"),
    (("bench", "run", "--json"), "closed/run.json", 2, "cannot write {}: Permission denied"),
    (("bench", "run", "--json"), "file/run.json", 2, "cannot write {}: no directory {parent}; make it first"),
    (("reproduce", "flowspec-table-3", "--out"), "locked", 2,
     "cannot make the directory {}/measured: Permission denied; give another --out"),
    (("generate", "x", "--trace"), "closed/a/b", 2, "cannot write {}: Permission denied"),
    (("generate", "x", "--model"), "closed/model", 1, f"cannot use {{}}: {DENIED}"),
    (("deploy", "init", "a@127.0.0.1", "b@127.0.0.1", "--ssh-config"), _LONG, 1,
     f"cannot use {{}}: {TOO_LONG}"),
    (("deploy", "up", "--cluster"), "closed/cluster.toml", 1, f"cannot use {{}}: {DENIED}"),
    (("device", "profile", "--out"), "locked/mine.toml", 2, "cannot write {}: Permission denied")])
def test_a_path_that_the_system_refuses_is_one_line(place: Path, flowspec: Flowspec, command: tuple[str, ...],
                                                    path: str, code: int, says: str) -> None:
    given = str(place / path)
    before = sorted(place.iterdir())
    expected = says.format(given, parent=Path(given).parent)
    assert flowspec(*command, given) == (code, f"flowspec: error: {expected}\n")
    assert sorted(place.iterdir()) == before


def test_models_are_not_fetched_into_a_place_that_refuses_them(place: Path, flowspec: Flowspec,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    models = place / "locked" / "models"
    monkeypatch.setenv("FLOWSPEC_MODELS", str(models))
    assert flowspec("models", "fetch", "qwen3-8b") == (
        2, f"flowspec: error: cannot make the directory {models}: Permission denied; give another one\n")
