"""docs/first-hour.md: its commands, run in order on boards that pass for Jetsons, print what stands there.

FLOWSPEC_UPDATE_DOCS=1 renews the outputs in the document instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kits import board_images, container_boards, deployments, documents, jetson_boards
from kits.jetson_boards import Orins

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

DOCUMENT = board_images.REPOSITORY / "docs" / "first-hour.md"
PATIENCE = 900.0
UPDATE = bool(os.environ.get("FLOWSPEC_UPDATE_DOCS"))
# What may differ between two runs, and what is too long to be printed in a document.
ABRIDGED = ((r"(\d+ (?:changed|to change)): .*", r"\1: …"), (r"\x1b\[[\d;]*m", ""))
VARIABLE = (
    (r"[+-]?\d+(?:\.\d+)? (m?s|GB|Mbps|tokens/s|a turn|a round|J a token|W|changed|to change|changes)\b",
     r"# \1"),
    (r"\b[0-9a-f]{16}\b", "ID"), (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE"), (r"± \d+\.\d+", "± #"),
    (r"[\d,]+ MB of it free", "# MB of it free"), (r"\d+\.\d+ of ", "# of "),
    (r"\n {8,}", " "), (r" +", " "))  # and where a table's cells are wrapped


class Pc:
    """The machine from which the document's commands are given: the fleet's control place."""

    def __init__(self, fleet: Orins, directory: Path) -> None:
        self._fleet, self._directory = fleet, directory
        tools = directory / "bin"
        tools.mkdir()
        # The boards' keys and addresses, as a user has them in ~/.ssh.
        for name, command in (("ssh", f"{board_images.which('ssh')} -F {fleet.ssh_config}"),
                              ("flowspec", f"{sys.executable} -m flowspec_edge.cli.main")):
            (tools / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (tools / name).chmod(0o755)
        deployments.fill_wheelhouse(fleet, directory / "wheelhouse")  # there is no network

    def run(self, script: str) -> tuple[str, int]:
        """What the commands print, errors included, in the document's words; and how they end."""
        script = script.replace("10.0.0.{10..13}", " ".join(map(self._fleet.address, range(4))))
        done = subprocess.run(
            self._fleet.command(["bash", "-c", self._theirs(script)]), cwd=self._directory, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=PATIENCE, env={**os.environ, "PATH": f"{self._directory}/bin:{os.environ['PATH']}",
                                   "PYTHONPATH": str(board_images.REPOSITORY), "COLUMNS": "110"})
        return self._ours(done.stdout), done.returncode

    def _theirs(self, script: str) -> str:
        for board in range(4):
            script = script.replace(f"10.0.0.{10 + board}", self._fleet.address(board))
        return re.sub(r"\bme\b", container_boards.USER, script)

    def _ours(self, printed: str) -> str:
        for board in range(4):
            printed = re.sub(rf"{re.escape(self._fleet.address(board))}\b", f"10.0.0.{10 + board}", printed)
        printed = printed.replace(f"{self._directory}/", "")
        # How far a command is: on the document's terminal a bar that goes.
        printed = re.sub(r"(?m)^flowspec: (?!error: ).*, \d+ s(?:, about \d+ s left)?\n", "", printed)
        return re.sub(rf"(?<![\w.-]){container_boards.USER}(?![\w.-])", "me", printed)


def on_each_board(fleet: Orins, script: str) -> None:
    """Run what a user types at each board, who is asked for a password once."""
    for board in range(4):
        own = script.replace("orin-0", fleet.name(board))
        done = fleet.ssh(board, f"set -e; echo {jetson_boards.PASSWORD} | sudo -S -p '' -v; {own}")
        assert done.returncode == 0, done.stderr


def by_hand(fleet: Orins, action: str) -> None:
    """What the document has the user do with hands."""
    match action.split():
        case ["reboot"]:
            for board in range(4):
                fleet.reboot(board)
        case ["power", "off", name]:
            fleet.cut_off(int(name.removeprefix("orin-")))
        case ["power", "on", name]:
            fleet.start(int(name.removeprefix("orin-")))
        case _:
            raise AssertionError(f"the document names an action that this test does not have: {action}")


def test_the_hour_goes_as_the_document_says(orins: Orins, tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    pc = Pc(orins, tmp_path)
    outputs: list[str | None] = []
    wrong = []
    for step in documents.steps(text):
        printed = ""
        if not step.script:
            by_hand(orins, step.what)
        elif step.what == "each board":
            on_each_board(orins, step.script)
        else:
            said, status = pc.run(step.script)
            printed = documents.masked(said, ABRIDGED)
            # Alone and with a board that is off, `status` says so by its exit code, too.
            if status and step.script != "flowspec deploy status\n":
                wrong.append(f"{step.script}ends with {status}: {printed}")
                break  # what follows would wait for what is not there
        expected = step.output or ""
        unlike = documents.difference(documents.masked(expected, VARIABLE), documents.masked(printed, VARIABLE))
        outputs.append(printed if unlike else None)  # figures alone are no reason to change the document
        if unlike and step.output is not None and not UPDATE:
            wrong.append(f"{step.script}{unlike!r} is not what was printed: {printed}")
    if UPDATE and not wrong:
        DOCUMENT.write_text(documents.renewed(text, outputs))
    assert not wrong, "\n".join(wrong)
