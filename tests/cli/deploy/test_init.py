"""``flowspec deploy init`` over a real ssh."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits import ssh_boards

from flowspec_edge.boards.deploy.resolve import resolve_deployment
from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.cli.main import main


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_boards.Boards]:
    with ssh_boards.boards(2, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards


def options(boards: ssh_boards.Boards, key: str = "user") -> list[str]:
    return ["--user", "root", "--key", f"{boards.directory}/{key}", "--ssh-config",
            f"{boards.directory}/config"]


@pytest.fixture
def copied_machine_id(boards: ssh_boards.Boards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The last board has the machine id of the first, as a copied SD card makes it."""
    copied, machine = tmp_path_factory.mktemp("copied") / "machine-id", "/etc/machine-id"
    copied.write_text((boards.root(0) / "run/machine-id").read_text())
    boards.inside(2, "mount", "--bind", str(copied), machine)
    yield
    boards.inside(2, "mount", "--bind", "/run/machine-id", machine)  # its own again


@ssh_boards.needs_boards
def test_the_file_that_is_written_loads(boards: ssh_boards.Boards, tmp_path: Path,
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
    assert main(["deploy", "init", hosts[0], "--out", str(out)]) == 2  # what has to be mended in any case comes first
    assert "a cluster needs two boards at least" in capsys.readouterr().err
    assert out.read_text() == before
    assert main(["deploy", "init", *hosts, *options(boards), "--out", str(out), "--force"]) == 0
    shown = capsys.readouterr().out
    assert "is written: look through it, then: flowspec doctor" in shown
    # The same words at the terminal, in the file and in --json.
    assert said["boards"][0]["faults"]
    for fault in said["boards"][0]["faults"]:
        assert f"  → {fault}\n" in shown
        assert f"#   → {fault}\n" in before


@ssh_boards.needs_boards
def test_an_unreachable_board_is_named_and_nothing_written(
        boards: ssh_boards.Boards, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, other, out = boards.bed.address(0), boards.bed.address(2), tmp_path / "cluster.toml"

    def refused(*arguments: str) -> str:
        assert main(["deploy", "init", here, *arguments, "--out", str(out)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert here not in error
        return error

    unshared = boards.directory / "unshared"  # a connection of another test's would let anyone in
    unshared.write_text(f"ControlPath none\n{(boards.directory / 'config').read_text()}"
                        f"Host {here}\nIdentityFile {boards.directory}/user\n")
    stranger = options(boards, "stranger")[:-1]
    said = refused(other, *stranger, str(unshared))
    assert said.startswith(f"flowspec: error: {other}: ssh: it does not let this user in with this key (ssh")
    assert f"({other}" not in said  # the line has named the board
    assert "Permission denied" in said
    said = refused(f"{other}:2222", *options(boards))
    assert "nothing answers at port 2222 (" in said
    assert "start sshd there (sudo systemctl enable --now ssh), or see --port; " in said  # there is no file
    assert "no-such-host.invalid is unknown here" in refused("no-such-host.invalid", *options(boards))
    assert list(tmp_path.iterdir()) == []


@ssh_boards.needs_boards
def test_each_silent_board_has_a_line(boards: ssh_boards.Boards, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    here, first, second = (boards.bed.address(place) for place in (0, 1, 2))
    out = tmp_path / "cluster.toml"
    hosts = [here, f"{first}:2222", f"{second}:2223"]
    assert main(["deploy", "init", *hosts, *options(boards), "--out", str(out)]) == 1
    shown = capsys.readouterr()
    *lines, last = shown.err.splitlines()
    assert len(lines) == 2
    for line, address, port in zip(lines, (first, second), (2222, 2223), strict=True):
        assert line.startswith(f"  {address}: ssh: nothing answers at port {port} ")
        assert line.endswith("or see --port")
    assert last == f"flowspec: error: 2 boards do not answer; {out} is not written"
    assert socket.gethostname() in shown.out  # the one that does
    assert not out.exists()


@ssh_boards.needs_boards
@pytest.mark.usefixtures("copied_machine_id")
def test_two_boards_with_one_machine_id_are_an_error(boards: ssh_boards.Boards, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """By one kernel: one machine; by two: a copied SD card."""
    hosts, out = [boards.bed.address(place) for place in (0, 1, 2)], tmp_path / "cluster.toml"

    def refused() -> str:
        assert main(["deploy", "init", *hosts, *options(boards), "--out", str(out)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{hosts[2]}: " in error
        assert hosts[0] in error  # whose number it is
        assert hosts[1] not in error
        assert not out.exists()
        return error

    other = tmp_path / "boot_id"
    other.write_text("00000000-0000-4000-8000-000000000000\n")
    assert "systemd-machine-id-setup" not in refused()
    boards.inside(2, "mount", "--bind", str(other), "/proc/sys/kernel/random/boot_id")
    assert "rm -f /etc/machine-id /var/lib/dbus/machine-id" in refused()


@pytest.mark.slow
@ssh_boards.needs_boards
@pytest.mark.usefixtures("copied_machine_id")
def test_doctor_names_the_board_whose_machine_id_is_anothers(boards: ssh_boards.Boards,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    """Slow because it measures the links, too."""
    assert main(["doctor", "--cluster", str(boards.file), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)["boards"]
    assert [[finding["state"] for finding in board["findings"] if finding["check"] == "machine-id"]
            for board in shown] == [[], [], ["failed"]]


def test_an_own_address_with_another_port_is_asked_over_ssh(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                            ) -> None:
    """Where no sshd listens; no program gets a port below 1024 by chance."""
    out, none = tmp_path / "cluster.toml", tmp_path / "config"
    none.touch()
    assert main(["deploy", "init", "127.0.0.1:1", "127.0.0.2:2", "--ssh-config", str(none),
                 "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert "127.0.0.1 port 1" in error
    assert "127.0.0.2 port 2" in error
    assert not out.exists()
