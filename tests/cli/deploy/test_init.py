"""``flowspec deploy init`` over a real ssh."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import sshkit

from flowspec_edge.cli.main import main
from flowspec_edge.fleet.deploy.resolve import resolve_deployment
from flowspec_edge.fleet.inventory import load_inventory


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshkit.Boards]:
    with sshkit.boards(2, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards


def options(boards: sshkit.Boards, key: str = "user") -> list[str]:
    return ["--user", "root", "--key", f"{boards.directory}/{key}", "--ssh-config",
            f"{boards.directory}/config"]


@sshkit.needs_boards
def test_the_file_that_is_written_loads(boards: sshkit.Boards, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    hosts, out = [boards.bed.address(place) for place in (0, 1, boards.outside)], tmp_path / "my lab.toml"
    assert main(["deploy", "init", *hosts, *options(boards), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [board["address"] for board in said["boards"]] == hosts
    assert {board["hostname"] for board in said["boards"]} == {socket.gethostname()}
    found = load_inventory(out)
    assert found.cluster.name == "my-lab"
    assert [device.address for device in found.device] == hosts
    assert [device.ssh_user for device in found.device] == ["root"] * 3
    assert [found.interface(device) for device in found.device] == [boards.bed.interface(0)] * 3
    assert not found.decided
    assert [device.address for device in resolve_deployment(found, out).boards] == hosts
    before = out.read_text()
    assert main(["deploy", "init", *hosts, *options(boards), "--out", str(out)]) == 2
    assert "is there already: give another name as --out, or --force" in capsys.readouterr().err
    assert out.read_text() == before
    assert main(["deploy", "init", *hosts, *options(boards), "--out", str(out), "--force"]) == 0
    shown = capsys.readouterr().out
    assert "is written: look through it, then: flowspec doctor" in shown
    # The same words at the terminal, in the file and in --json.
    assert said["boards"][0]["faults"]
    for fault in said["boards"][0]["faults"]:
        assert f"  → {fault}\n" in shown
        assert f"#   → {fault}\n" in before


@sshkit.needs_boards
def test_a_board_that_cannot_be_reached_is_named_and_nothing_is_written(
        boards: sshkit.Boards, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, other, out = boards.bed.address(0), boards.bed.address(2), tmp_path / "cluster.toml"

    def refused(*arguments: str) -> str:
        assert main(["deploy", "init", here, *arguments, "--out", str(out)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert here not in error
        return error

    said = refused(other, *options(boards, "stranger"))  # with which no connection is shared yet
    assert f"{other} ({other}): ssh: " in said
    assert "Permission denied" in said
    assert "port 2222: Connection refused: ssh there by hand" in refused(f"{other}:2222", *options(boards))
    assert "no-such-host.invalid is unknown here" in refused("no-such-host.invalid", *options(boards))
    assert list(tmp_path.iterdir()) == []


def test_errors_found_before_any_connection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "cluster.toml")
    for arguments, fault in [(["a"], "needs two boards at least"), (["a", "b@"], "'b@' is not [USER@]HOST"),
                             (["a", "b", "--key", "/no/key"], "no file /no/key")]:
        assert main(["deploy", "init", *arguments, "--out", out]) == 2
        assert fault in capsys.readouterr().err
    assert main(["deploy", "init", "a", "b", "--out", f"{tmp_path}/no/cluster.toml"]) == 2
    assert "make it first" in capsys.readouterr().err
