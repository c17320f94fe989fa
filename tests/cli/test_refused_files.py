"""Files and directories that the system refuses: one line that names the path, no traceback, nothing left
behind, and nothing computed before."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

_LONG = "x" * 300  # a name has at most 255 bytes
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2
_PRCTL = ctypes.CDLL(None).prctl


def without_overrides() -> None:
    """Let permissions bind the program that runs next, if it is root's, too."""
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        _PRCTL(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def flowspec(directory: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "flowspec_edge", *arguments], cwd=directory,
                          capture_output=True, text=True, check=False, preexec_fn=without_overrides,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    return done.returncode, done.stderr


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
def test_a_path_that_the_system_refuses_is_one_line(place: Path, command: tuple[str, ...], path: str,
                                                    code: int, says: str) -> None:
    given = str(place / path)
    before = sorted(place.iterdir())
    expected = says.format(given, parent=Path(given).parent)
    assert flowspec(place, *command, given) == (code, f"flowspec: error: {expected}\n")
    assert sorted(place.iterdir()) == before


def test_models_are_not_fetched_into_a_place_that_refuses_them(place: Path) -> None:
    models = place / "locked" / "models"
    assert flowspec(place, "models", "fetch", "qwen3-8b", FLOWSPEC_MODELS=str(models)) == (
        2, f"flowspec: error: cannot make the directory {models}: Permission denied; give another one\n")
