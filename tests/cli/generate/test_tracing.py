"""``flowspec generate --trace``: with and without a file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kits.chrome_traces import check_format, tracks
from kits.network_beds import heed_ctrl_c

from flowspec_edge.cli.main import main


def arguments(model: Path, trace: Path, tokens: int = 12) -> list[str]:
    return ["generate", "x = ", "--model", str(model), "--clock", "virtual", "--stages", "2",
            "--max-new-tokens", str(tokens), "--trace", str(trace)]


def test_a_request_s_trace_has_its_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                        ) -> None:
    file = tmp_path / "trace.json"
    assert main([*arguments(model, file), "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(file.read_text())
    said = [e["args"].get("text", "") for e in tracks(check_format(document))["D0", "verification"]]
    assert json.loads(out)["text"].startswith("".join(said))
    assert "".join(said)
    assert document["otherData"]["clock"] == "virtual"
    assert document["otherData"]["profile"] == "paper-7b"
    assert err == f"flowspec: its trace is in {file}\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_request_that_never_began_has_no_trace(model: Path, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    os.truncate(broken / "target" / "model.safetensors", 1000)
    assert main(arguments(broken, tmp_path / "trace.json")) != 0
    assert "flowspec: the request had not begun, so there is no trace\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [broken]


@pytest.mark.slow
@pytest.mark.nightly
def test_an_interrupted_request_leaves_what_there_is(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("of an earlier one")
    command = [sys.executable, "-c", "import sys; from flowspec_edge.cli.main import main; sys.exit(main())",
               *arguments(model, file, 1900), "--temperature", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=heed_ctrl_c) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert str(file) in err
    assert "(cancelled)" in err
    document = json.loads(file.read_text())
    assert tracks(check_format(document))["D0", "verification"]
