"""Profiles of all boards of a cluster: the cluster file's text, and boards with a real sshd."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from kits import ssh_boards
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.boards.measurement.cluster import is_measured, name_profile, profile_file
from flowspec_edge.cli.main import main
from flowspec_edge.device_profile import load_profile, render
from flowspec_edge.errors import FlowspecError

FILE = """# a lab
[cluster]
name = "lab"

[[device]]
name = "a"   # the first
address = "10.0.0.1"
profile = "orin-nano-8gb"  # by its model and memory; not measured here
role = "draft"
[[device]]
name = "b"
address = "10.0.0.2"
role = "verify"
"""


def test_the_file_names_the_profile_and_keeps_all_else(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    for board in "ab":
        name_profile(path, board, tmp_path / "profiles" / f"{board}.toml")
    assert [device.profile for device in load_inventory(path).device] == [
        "profiles/a.toml", "profiles/b.toml"]
    lines = path.read_text().splitlines()
    assert [line for line in lines if "profiles/" not in line] == [
        line for line in FILE.splitlines() if "profile =" not in line]
    name_profile(path, "b", tmp_path / "profiles/b.toml")
    assert path.read_text().splitlines() == lines


def test_a_file_that_cannot_be_edited_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = ("device = [{name = \"a\", address = \"10.0.0.1\"}, {name = \"b\", address = \"10.0.0.2\"}]\n"
            "[cluster]\nname = \"lab\"\n")
    path.write_text(text)
    with pytest.raises(FlowspecError, match=r'write profile = "profiles/a.toml" below'):
        name_profile(path, "a", tmp_path / "profiles/a.toml")
    assert path.read_text() == text


def test_only_a_measured_file_of_its_own_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    a, b = load_inventory(path).device
    assert profile_file(a, path) == tmp_path / "profiles/a.toml"  # the package's is not overwritten
    assert profile_file(b.model_copy(update={"profile": "own.toml"}), path) == tmp_path / "own.toml"
    (tmp_path / "own.toml").write_text(render(load_profile("orin-nano-8gb")))
    assert not is_measured(tmp_path / "own.toml")  # an estimate
    (tmp_path / "own.toml").write_text(render(load_profile("cpu-2core")))
    assert is_measured(tmp_path / "own.toml")
    assert not is_measured(tmp_path / "none.toml")


@pytest.mark.slow
@ssh_boards.needs_boards
def test_boards_are_measured_over_ssh_and_a_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                       ) -> None:
    """board-1 has no flowspec: the other is measured all the same; the second run measures board-1 alone."""
    model = tiny_model_dir(tmp_path / "model", layers=2, hidden=32)
    for part in ("spd", "draft-lm", "eagle2"):  # plain decoding alone is measured faster
        shutil.rmtree(model / part)
    with ssh_boards.boards(1, tmp_path) as boards, boards.bed.entered(boards.outside):
        file = tmp_path / "lab.toml"
        text = boards.file.read_text()
        first, second = text.split("[[device]]")[1:]
        broken = second.replace("name =", 'python = "/nowhere/python"\nname =')
        file.write_text("[[device]]".join([text.split("[[device]]")[0], first, broken]))
        command = ["device", "profile", "--cluster", str(file), "--quick", "--model", str(model)]
        assert main(command) == 1
        err = capsys.readouterr().err
        assert "1 of 2 boards are not measured: board-1" in err
        assert "install it there with flowspec deploy up" in err
        assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == ["board-0.toml"]
        before = load_profile(str(tmp_path / "profiles/board-0.toml"))
        file.write_text(file.read_text().replace('"/nowhere/python"', f'"{sys.executable}"'))
        assert main(command) == 0
        assert "board-0: has been measured" in capsys.readouterr().err
        profiles = [load_profile(str(tmp_path / f"profiles/board-{i}.toml")) for i in (0, 1)]
        assert [p.provenance for p in profiles] == ["measured", "measured"]
        assert [p.conditions.peer for p in profiles if p.conditions] == ["board-1", "board-0"]
        assert profiles[0].stage == before.stage  # not measured again
        assert [device.profile for device in load_inventory(file).device] == [
            "profiles/board-0.toml", "profiles/board-1.toml"]
