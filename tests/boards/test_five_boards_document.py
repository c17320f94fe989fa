"""docs/five-boards.md: what its commands print that need no board, for Orins as `deploy init` describes them.

FLOWSPEC_UPDATE_DOCS=1 renews the outputs in the document instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kits import documents, jetson_boards

from flowspec_edge.boards.deploy.resolve import resolve_deployment
from flowspec_edge.boards.doctor.discover import of_facts, render_cluster_toml
from flowspec_edge.boards.inventory import DeviceEntry, load_inventory
from flowspec_edge.boards.probe.facts import system_facts
from flowspec_edge.boards.probe.onboard.system import FILES
from flowspec_edge.cli.deploy.rollout_output import show_roles

DOCUMENT = Path(__file__).parents[2] / "docs" / "five-boards.md"
MODEL = "NVIDIA Jetson Orin NX Engineering Reference Developer Kit Super"


def described() -> str:
    """The cluster file of five boards with the files of L4T, whose torch sees the GPU."""
    files = {name: path.read_text() if (path := jetson_boards.FILES / name).is_file() else "" for name in FILES}
    files |= {"sys/firmware/devicetree/base/model": MODEL, "proc/meminfo": "MemTotal: 16032000 kB\n"
              "MemAvailable: 15332000 kB\n"}
    boards = [of_facts(DeviceEntry(name=f"orin-{place}", address=f"10.0.0.{10 + place}", ssh_user="me"),
                       system_facts({
        "hostname": f"orin-{place}", "machine": "aarch64", "python": [3, 10, 12], "files": files,
        "interface": "eth0", "disks": {"/opt/flowspec": {"free": 69_000_000_000}}, "gpu": True,
        "torch": {"version": "2.8.0", "cuda": [8, 7], "why": ""}, "sudo": "", "user": "me",
        "memory": {"held": 0}})) for place in range(5)]
    return render_cluster_toml(boards, "cluster", "cluster.toml", given={"power_mode": "MAXN_SUPER"},
                               all_boards=True)


def test_the_document_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The roles are those that `deploy plan` prints before it asks the boards."""
    text, file = DOCUMENT.read_text(), tmp_path / "cluster.toml"
    file.write_text(described())
    (tmp_path / ".ssh").mkdir()
    outputs: list[str | None] = []
    wrong = []
    for step in documents.steps(text):
        if step.what == "the boards":
            show_roles(resolve_deployment(load_inventory(file), file))
            printed = capsys.readouterr().err
        else:
            done = subprocess.run(
                ["bash", "-c", f"set -e; {step.script}"], cwd=tmp_path, text=True, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, "HOME": str(tmp_path),
                     "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
            assert done.returncode == 0, (step.script, done.stdout)
            printed = done.stdout
        outputs.append(documents.masked(printed, ()))
        unlike = documents.difference(documents.masked(step.output or "", ()), documents.masked(printed, ()))
        if unlike and step.output is not None:
            wrong.append(f"{step.script}{unlike!r} is not what was printed: {printed}")
    assert (tmp_path / ".ssh/id_ed25519.pub").is_file()
    if os.environ.get("FLOWSPEC_UPDATE_DOCS"):
        DOCUMENT.write_text(documents.renewed(text, outputs))
    else:
        assert not wrong, "\n".join(wrong)


def test_every_board_has_a_part_of_the_demonstration_model() -> None:
    """Left to the planner, it would use fewer; the document gives every board a role."""
    roles = next(step.output for step in documents.steps(DOCUMENT.read_text()) if step.what == "the boards")
    assert roles is not None
    assert [f"orin-{place}" in roles for place in range(5)] == [True] * 5
    assert "does nothing" not in roles
