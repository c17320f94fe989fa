"""Standard streams that are closed, full, or lack characters: one line, a code other than 0, and no lost
result."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.common import streams
from flowspec_edge.cli.main import main

FLOWSPEC = f"{sys.executable} -m flowspec_edge"
FULL = "flowspec: error: cannot write the output: No space left on device: free some space\n"
CLOSED = "flowspec: error: standard output is closed: send it to a file, or to /dev/null\n"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    given = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **environment}
    return subprocess.run(["sh", "-c", line], capture_output=True, check=False, env=given)


@pytest.mark.parametrize(("command", "code", "says"), [
    ("profiles > /dev/full", 1, FULL), ("--version > /dev/full", 1, FULL), ("--help > /dev/full", 1, FULL),
    ("device show paper-7b > /dev/full", 1, FULL), ("profiles >&-", 1, CLOSED),
    ("fly 2>&-", 2, ""), ("fly 2> /dev/full", 2, ""),
    ("profiles 1< /dev/null", 1, "flowspec: error: cannot write the output: Bad file descriptor: it is not "
                                 "open for writing\n")])
def test_what_standard_output_does_not_take_is_one_line(command: str, code: int, says: str) -> None:
    done = shell(f"{FLOWSPEC} {command}")
    assert (done.returncode, done.stdout, done.stderr.decode()) == (code, b"", says)


def test_closed_standard_error_and_input_cost_nothing() -> None:
    expected = shell(f"{FLOWSPEC} profiles")
    assert expected.returncode == 0
    assert shell(f"{FLOWSPEC} profiles <&- 2>&-").stdout == expected.stdout


@pytest.mark.parametrize(("encoding", "expected"), [
    ("latin-1", "caf\xe9 \\u4e2d\n"), ("ascii", "caf\\xe9 \\u4e2d\n"), ("utf-8", "café 中\n"),
    ("ascii:replace", "caf? ?\n")])
def test_a_character_that_the_encoding_lacks_is_written_by_its_number(
        monkeypatch: pytest.MonkeyPatch, encoding: str, expected: str) -> None:
    codec, _, errors = encoding.partition(":")
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, codec, errors or None))
    streams.prepare_streams()
    print("café 中", flush=True)
    assert output.getvalue().decode(codec) == expected


def test_a_full_disk_does_not_cost_the_results_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                        ) -> None:
    """The table is shown; the file that cannot be written is the error at the end."""
    model, out = tiny_model_dir(tmp_path), tmp_path / "out" / "run.json"
    out.parent.mkdir()
    command = ["bench", "run", "--model", str(model), "--stages", "2", "--strategies", "chunk_pp", "--limit",
               "1", "--max-new-tokens", "4", "--json", str(out)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        code = main(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shown, said = capsys.readouterr()
    assert code == 2
    assert "chunk_pp" in shown
    assert said.splitlines()[-1] == f"flowspec: error: cannot write {out}: File too large"
    assert [*out.parent.iterdir()] == []
    assert main(command) == 0
    assert json.loads(out.read_text())["complete"]
