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

from flowspec_edge.util.interpreter import module_command

PROMPT = "def f(x): return"


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
