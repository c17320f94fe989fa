"""docs/guides/boards.md, operating.md and removing.md: their commands, run on boards that pass for Jetsons, print what
stands there, as do those of the references that boards.md has read on its way.

The guides show what boards with a GPU print.  Each line that is otherwise on these boards is one of ``WITHOUT_GPU``.
FLOWSPEC_UPDATE_DOCS=1 renews the outputs in the documents instead.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kits import board_images, container_boards, deployments, documents, jetson_boards
from kits.jetson_boards import Orins

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

GUIDES = [board_images.REPOSITORY / "docs" / "guides" / f"{name}.md" for name in ("boards", "operating", "removing")]
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
# What boards without a GPU print, and what boards with one print instead.
_INSTALL = re.escape("sudo pip3 install --index-url https://pypi.jetson-ai-lab.io/jp6/cu126/+simple/ 'torch==2.8.0' "
                     "'numpy==1.26.4'")
WITHOUT_GPU = (
    (r"; torch 2\.8\.0, which sees no GPU", "; torch 2.8.0, which sees the GPU"),  # of `deploy init`
    (r"(?m)^(# Python .*, torch 2\.8\.0, which sees) no GPU$", r"\1 the GPU"),  # and of the file that it writes
    (r"(?m)^(?:# )?  → torch: 2\.8\.0, built for CUDA 12\.8, sees no CUDA GPU, and torch_device is 'cuda'; install the "
     rf'torch that was made for this board: {_INSTALL}; or set torch_device = "cpu" for it in the cluster file\n', ""),
    (r"(?m)^  note: orin-\d: profile \S+ is of a cuda device, and torch_device is 'cpu': measure the board with "
     r"flowspec device profile --device cpu\n", ""),  # of `deploy plan` and `up`, after torch_device is set
    (r'(?m)^  note: orin-\d: torch: torch_device is "cpu", so this Jetson computes on its CPU; set '
     r'torch_device = "cuda" in the cluster file\n', ""),
    (rf"(?<=Super, ){platform.machine()}(?=, L4T)", "aarch64"))


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


def by_hand(fleet: Orins, pc: Pc, action: str) -> str:
    """Do what a document has the user do with hands, or what these boards need; what is wrong with it."""
    match action.split():
        case ["reboot"]:
            for board in range(4):
                fleet.reboot(board)
        case ["power", "off", name]:
            fleet.cut_off(int(name.removeprefix("orin-")))
        case ["power", "on", name]:
            fleet.start(int(name.removeprefix("orin-")))
        case ["without", "a", "GPU"]:
            said, status = pc.run("flowspec deploy set torch_device=cpu")
            if status or said != "cluster.toml is changed: see flowspec deploy plan --cluster cluster.toml\n":
                return f"torch_device is not set: {said}"
        case _:
            raise AssertionError(f"the document names an action that this test does not have: {action}")
    return ""


class Reader:
    """Who does what documents say.

    wrong  what was not as they say
    seen   the places in ``WITHOUT_GPU`` of what was printed
    """

    def __init__(self, fleet: Orins, pc: Pc) -> None:
        self._fleet, self._pc = fleet, pc
        self.wrong: list[str] = []
        self.seen: set[int] = set()
        self._renewed: list[tuple[Path, str]] = []

    def read(self, document: Path) -> bool:
        """False where what follows would wait for what is not there."""
        text = document.read_text()
        outputs: list[str | None] = []
        for step in documents.steps(text):
            printed, expected, status = "", step.output or "", 0
            if step.what.startswith("read "):
                if not self.read((document.parent / step.what.removeprefix("read ")).resolve()):
                    return False
            elif not step.script:
                if fault := by_hand(self._fleet, self._pc, step.what):
                    self.wrong.append(fault)
                    return False
            elif step.what == "each board":
                on_each_board(self._fleet, step.script)
            elif step.what == "the PC":
                said, status = self._pc.run(step.script)
                printed = self._as_with_a_gpu(documents.masked(said, ABRIDGED))
            else:  # the PC alone: tests/boards/test_guide_of_boards.py
                outputs.append(None)
                continue
            # With a board that is off, `status` says so by its exit code, too.
            if status and not (step.script == "flowspec deploy status\n" and "not reached" in expected):
                self.wrong.append(f"{step.script}ends with {status}: {printed}")
                return False
            unlike = documents.difference(documents.masked(expected, VARIABLE), documents.masked(printed, VARIABLE))
            outputs.append(printed if unlike else None)  # figures alone are no reason to change the document
            if unlike and step.output is not None and not UPDATE:
                self.wrong.append(f"{document.name}: {step.script}{unlike!r} is not what was printed: {printed}")
        self._renewed.append((document, documents.renewed(text, outputs)))
        return True

    def update(self) -> None:
        for document, text in self._renewed:
            document.write_text(text)

    def _as_with_a_gpu(self, printed: str) -> str:
        for place, (pattern, instead) in enumerate(WITHOUT_GPU):
            printed, count = re.subn(pattern, instead, printed)
            if count:
                self.seen.add(place)
        return printed


def test_the_hour_goes_as_the_guides_say(orins: Orins, tmp_path: Path) -> None:
    reader = Reader(orins, Pc(orins, tmp_path))
    all(reader.read(guide) for guide in GUIDES)
    assert not reader.wrong, "\n".join(reader.wrong)
    assert reader.seen == set(range(len(WITHOUT_GPU))), "these boards print what those with a GPU do"
    if UPDATE:
        reader.update()
