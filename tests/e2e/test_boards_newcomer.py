"""The way of someone with boards: the commands of the documents, run as they stand there.

The hub is a local directory (``kits.hub_server``), the models are tiny.  What needs boards is run by the tests of a
fleet (``test_first_hour.py`` and others); tests/cli/test_documented_commands.py checks its options.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits import documents
from kits.hub_server import hub
from kits.tiny_model_dir import tiny_eagle3, tiny_model_dir

from flowspec_edge.model.catalogue import find_known_model

FITS = documents.DOCS / "reference" / "plan.md"
PATIENCE = 1800.0
# The rest needs boards, root, a GPU, a network, or hours.
RUN_HERE = re.compile(
    r"(?!.*\.gguf)flowspec (models (?!train)|plan |generate (?!--cluster)|device profile (?!--peer|--cluster)"
    r"|deploy set model=)")


def test_the_table_of_boards_says_what_plan_says() -> None:
    """What fits, and the slowest stage; the predicted speeds are compared in the long tests."""
    made = documents.builder("build_boards")
    assert made.without_predictions(FITS.read_text()) == made.table(predicted=False)


@pytest.mark.soak
def test_the_tables_speeds_are_what_plan_predicts() -> None:
    """Other processors round otherwise, and a draft may then be ranked otherwise."""
    made = documents.builder("build_boards")
    [written] = made.TABLE.findall(FITS.read_text())
    figures = [[float(figure) for figure in re.findall(r"(?<=[ ])[\d.]+(?= [/|])", text)]
               for text in (written, made.table())]
    assert figures[1] == pytest.approx(figures[0], rel=0.05)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory with what the documents take for granted, and an environment with the command and a hub."""
    source = tiny_model_dir(tmp_path / "source")
    config = source / "target" / "config.json"  # for the documents' --context 4096
    config.write_text(config.read_text().replace('"max_position_embeddings": 2048',
                                                 '"max_position_embeddings": 8192'))
    tokenizer = source / "target" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()),
                                     "chat_template": "{{ messages[0].content }}"}))
    tiny_eagle3(source)
    found = find_known_model("qwen3-14b")
    assert found is not None
    known = found[1]
    assert known.small
    desk = tmp_path / "desk"
    for name in ("my-llama", "my-14b", "mine/target"):
        shutil.copytree(source / "target", desk / name)
    shutil.copytree(source / "eagle2", desk / "mine" / "eagle2")
    (desk / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    (desk / "cluster.toml").write_text(
        '[cluster]\nname = "desk"\nmodel = "demo"\n' + "".join(
            f'[[device]]\nname = "orin-{i}"\naddress = "10.0.0.{10 + i}"\nprofile = "orin-nano-8gb"\n'
            for i in range(5)))
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "flowspec").write_text(f'#!/bin/sh\nexec {sys.executable} -m flowspec_edge "$@"\n')
    (tools / "flowspec").chmod(0o755)
    repositories = {known.target: source / "target", known.heads["eagle3"]: source / "eagle3",
                    known.small: source / "draft-lm"}
    with hub(repositories) as (address, _):
        yield desk, {
            **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(documents.DOCS.parent),
            "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache"),
            "FLOWSPEC_MODELS": str(tmp_path / "models")}


@pytest.mark.soak
@pytest.mark.parametrize("read", ["guides/operating", "reference/profiles explained/planning", "guides/models"])
def test_every_command_that_needs_no_board_runs(read: str, desk: tuple[Path, dict[str, str]]) -> None:
    """Documents that are read one after the other: a plan is made for a board that was measured before."""
    directory, environment = desk
    texts = [(documents.DOCS / f"{document}.md").read_text() for document in read.split()]
    commands = [command for text in texts for command in documents.commands(text) if RUN_HERE.match(command)]
    assert not any(sign in command for command in commands for sign in ("sudo", ";", "|", ">"))
    assert len(commands) >= 3
    wrong = []
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=directory, env=environment, text=True, check=False,
                              capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
        if done.returncode:
            wrong.append(f"{command}\nends with {done.returncode}: {done.stderr or done.stdout}")
    assert not wrong, "\n".join(wrong)
    if read == "guides/operating":
        assert 'model = "qwen3-14b"' in (directory / "cluster.toml").read_text()
