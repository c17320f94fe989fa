"""docs/guides/boards.md and operating.md: what their commands print that need no board, for Orins as `deploy init`
describes them.

FLOWSPEC_UPDATE_DOCS=1 renews the outputs in the documents instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kits import documents, jetson_boards

from flowspec_edge.boards.deploy.resolve import resolve_deployment
from flowspec_edge.boards.doctor.discover import board_from_facts, render_cluster_toml
from flowspec_edge.boards.inventory import DeviceEntry, load_inventory
from flowspec_edge.boards.probe.facts import system_facts
from flowspec_edge.boards.probe.onboard.system import FILES
from flowspec_edge.cli.deploy.rollout_output import show_roles

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, OPERATING = DOCS / "guides" / "boards.md", DOCS / "guides" / "operating.md"
PLAN = "flowspec deploy plan\n"
BOARDS = (jetson_boards.ORIN_NX, *[jetson_boards.ORIN_NANO] * 3)


def described() -> str:
    """The cluster file of the guide's boards, with the files of L4T, whose torch sees the GPU."""
    def files(model: jetson_boards.Model) -> dict[str, str]:
        found = {name: path.read_text() if (path := jetson_boards.FILES / name).is_file() else "" for name in FILES}
        return found | {"sys/firmware/devicetree/base/model": model.name,
                        "proc/meminfo": f"MemTotal: {model.memory_kb} kB\n"
                                        f"MemAvailable: {model.memory_kb - 700_000} kB\n"}

    boards = [board_from_facts(DeviceEntry(name=f"orin-{place}", address=f"10.0.0.{10 + place}", ssh_user="me"),
                               system_facts({
                "hostname": f"orin-{place}", "machine": "aarch64", "python": [3, 10, 12], "files": files(model),
                "interface": "eth0", "disks": {"/opt/flowspec": {"free": 69_000_000_000}}, "gpu": True,
                "torch": {"version": "2.8.0", "cuda": [8, 7], "why": ""}, "sudo": "", "user": "me",
                "memory": {"held": 0}})) for place, model in enumerate(BOARDS)]
    return render_cluster_toml(boards, "cluster", "cluster.toml", cluster_settings={"power_mode": "MAXN_SUPER"},
                               all_boards=True)


def roles_of(output: str | None) -> str:
    """The first lines that `deploy plan` prints, before it asks the boards."""
    assert output is not None
    roles, _, changes = output.partition("\n\n")
    assert changes.startswith("orin-0: ")
    return f"{roles}\n"


def test_the_guides_show_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, tools = tmp_path / "cluster.toml", tmp_path / "bin"
    file.write_text(described())
    (tmp_path / ".ssh").mkdir()
    tools.mkdir()
    (tools / "ssh-copy-id").write_text('#!/bin/sh\necho "$@" >> ~/copied\n')  # there are no boards
    (tools / "ssh-copy-id").chmod(0o755)
    wrong = []
    for document in (GUIDE, OPERATING):
        text = document.read_text()
        outputs: list[str | None] = []
        for step in documents.steps(text):
            if step.script == PLAN:
                show_roles(resolve_deployment(load_inventory(file), file))
                roles = documents.masked(capsys.readouterr().err, ())
                if roles != roles_of(step.output):
                    wrong.append(f"{step.script}prints {roles}")
                outputs.append((step.output or "").replace(roles_of(step.output), roles))
                continue
            if step.what != "the PC alone":
                outputs.append(None)
                continue
            done = subprocess.run(
                ["bash", "-c", f"set -e; {step.script}"], cwd=tmp_path, text=True, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, "HOME": str(tmp_path),
                     "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"})
            assert done.returncode == 0, (step.script, done.stdout)
            printed = documents.masked(done.stdout, ())
            outputs.append(printed)
            unlike = documents.difference(documents.masked(step.output or "", ()), printed)
            if unlike and step.output is not None:
                wrong.append(f"{step.script}{unlike!r} is not what was printed: {printed}")
        if os.environ.get("FLOWSPEC_UPDATE_DOCS"):
            document.write_text(documents.renewed(text, outputs))
            wrong = []
    assert (tmp_path / ".ssh/id_ed25519.pub").is_file()
    assert (tmp_path / "copied").read_text().split() == [f"me@10.0.0.{10 + place}" for place in range(len(BOARDS))]
    settings = file.read_text().splitlines()
    assert len([line for line in settings if line.startswith('role = "auto"')]) == len(BOARDS)
    assert len([line for line in settings if line.startswith('model = "qwen3-14b"')]) == 1
    assert not wrong, "\n".join(wrong)


def test_init_describes_the_guides_boards() -> None:
    """One drafts, the others verify, all in the power mode that was asked for; a comment has each board's modes."""
    lines = [line.partition("  ")[0] for line in described().splitlines()]
    assert lines.count("# power mode 15W of 15W, 25W, MAXN_SUPER") == len(BOARDS)
    assert lines.count('power_mode = "MAXN_SUPER"') == 1
    assert [lines.count(f'role = "{role}"') for role in ("draft", "verify")] == [1, len(BOARDS) - 1]
