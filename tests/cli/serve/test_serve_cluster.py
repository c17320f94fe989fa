"""``flowspec serve --cluster``: boards with a real sshd each, a client on the draft device."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kits import ssh_boards
from kits.plain_answers import plain_text
from kits.process_clusters import PATIENCE
from kits.tiny_model_dir import tiny_model_dir
from openai import OpenAI

from flowspec_edge.cli.main import main
from flowspec_edge.util.interpreter import module_command

PROMPT = "def f(x): return"


@ssh_boards.needs_boards
def test_another_machine_than_the_draft_device_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ssh_boards.boards(2, tmp_path) as boards, boards.bed.entered(1):
        assert main(["serve", "--cluster", str(boards.file), "--port", "0"]) == 2
        address = boards.bed.address(0)
    said = capsys.readouterr().err
    assert f"this machine is not board-0 ({address}), the draft device of cluster bed, which has to run this" in said
    assert said.count("\n") == 1


@pytest.mark.soak
@ssh_boards.needs_boards
def test_boards_answer_clients_and_nothing_stays_on_them(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model", layers=2, hidden=32, vocab=97)
    with ssh_boards.boards(2, tmp_path) as boards, boards.bed.entered(0):
        command = [sys.executable, "-m", "flowspec_edge.cli.main", "serve", "--cluster", str(boards.file),
                   "--model", str(model), "--name", "tiny", "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                found = re.fullmatch(r"flowspec: serving tiny \(flowspec_plus, 2 stages, fp32, cluster bed\) "
                                     r"at (http://127.0.0.1:\d+/v1), the page at .*\n", line)
                assert found, line
                with OpenAI(base_url=found[1], api_key="none") as client:
                    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12)
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
        assert process.returncode == 0, said
        worker = " ".join(module_command("flowspec_edge.drivers.stage", python=sys.executable))
        for place in (1, 2):
            assert boards.left(place, worker) == 0
    assert done.choices[0].text == plain_text(model, PROMPT, 12)
