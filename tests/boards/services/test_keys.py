"""The boards' public keys over a real ssh: asked for, recorded, compared, and rotated."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits import ssh_boards

from flowspec_edge.boards.commands import SshRunner, as_root
from flowspec_edge.boards.services.keys import (
    BoardKeys,
    ask,
    board_public_keys,
    key_command,
    key_to_use,
    public_keys,
    record,
    recorded,
    rotation,
)
from flowspec_edge.cli.main import main
from flowspec_edge.errors import FlowspecError, UsageError

PATH = "/run/flowspec/board.key"  # every board here has a /run of its own
pytestmark = ssh_boards.needs_boards


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_boards.Boards]:
    with ssh_boards.boards(1, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards


def pythons(boards: ssh_boards.Boards) -> dict[str, str]:
    return {device.name: sys.executable for device in boards.inventory.device}


def on(boards: ssh_boards.Boards, place: int, *command: str) -> str:
    return SshRunner(boards.inventory, boards.inventory.device[place]).run(as_root(command))


def make(boards: ssh_boards.Boards) -> list[BoardKeys]:
    return ask(boards.inventory, boards.inventory.device, pythons(boards), "make", PATH)


def test_keys_are_made_once_and_compared_with_the_recorded(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    inventory, devices, here = boards.inventory, boards.inventory.device, tmp_path / "keys"
    for place in range(2):
        on(boards, place, "rm", "-rf", "/run/flowspec")
    found = make(boards)
    assert [(key.name, len(key.publics), key.error) for key in found] == [
        (f"board-{place}", 1, "") for place in range(2)]
    publics = {key.name: key.publics[0] for key in found}
    assert len(set(publics.values())) == 2
    assert recorded(devices, here) == {}
    record(here, publics)
    assert recorded(devices, here) == publics
    assert (here / "board-1.pub").stat().st_mode & 0o777 == 0o644
    for place in range(2):
        secret = json.loads(on(boards, place, "cat", PATH))["secret"]
        assert all(secret not in file.read_text() for file in here.iterdir())
        assert on(boards, place, "stat", "-c", "%a %U", PATH).split() == ["400", "root"]
    assert make(boards) == found == public_keys(inventory, devices, pythons(boards), here, PATH)

    on(boards, 1, "rm", PATH)
    make(boards)
    changed = public_keys(inventory, devices, pythons(boards), here, PATH)
    assert [bool(key.error) for key in changed] == [False, True]
    assert changed[1].error.startswith("board-1: its key has changed: it has ")
    assert f"{here / 'board-1.pub'} says {publics['board-1'][:10]}…: if you replaced" in changed[1].error
    (here / "board-1.pub").unlink()
    assert not any(key.error for key in public_keys(inventory, devices, pythons(boards), here, PATH))


def test_a_rotation_after_one_that_an_earlier_flowspec_left_half_way(boards: ssh_boards.Boards, tmp_path: Path
                                                                     ) -> None:
    """The steps of ``Rollout.up(rotate=True)`` that concern keys; where they may be interrupted: test_diff.

    The earlier one had two files: the former pair, which its release may still need, in the second.
    """
    devices, here = boards.inventory.device, tmp_path / "keys"

    def held() -> dict[str, tuple[str, ...]]:
        return board_public_keys(boards.inventory, devices, pythons(boards), PATH)

    before = {key.name: key_to_use(key.publics, "") for key in make(boards)}
    record(here, before)
    on(boards, 1, "mv", PATH, f"{PATH}.old")
    make(boards)
    ask(boards.inventory, devices, pythons(boards), rotation(held(), recorded(devices, here)), PATH)
    assert json.loads(on(boards, 1, "cat", f"{PATH}.old"))["public"] == before["board-1"]
    after = {name: keys[-1] for name, keys in held().items()}
    for place, key in enumerate(after.values()):
        on(boards, place, *key_command(sys.executable, "keep", PATH, key))
        assert on(boards, place, "ls", "-A", "/run/flowspec").split() == ["board.key"]
    assert not set(after.values()) & set(before.values())
    assert held() == {name: (key,) for name, key in after.items()}


def test_a_board_that_cannot_be_asked_is_named(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    devices = boards.inventory.device
    found = ask(boards.inventory, devices, {**pythons(boards), "board-1": "/nowhere"}, "make", PATH)
    assert [key.error.split(" (")[0] for key in found] == ["", "board-1"]
    with pytest.raises(FlowspecError, match=r"^board-1 \(.*\): exit code 1$"):
        board_public_keys(boards.inventory, devices, {**pythons(boards), "board-1": "/usr/bin/false"}, PATH)
    found = public_keys(boards.inventory, devices, {**pythons(boards), "board-1": "/usr/bin/true"}, tmp_path, PATH)
    assert "is not a compatible flowspec" in found[1].error


def test_a_record_that_is_no_key(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    (tmp_path / "board-1.pub").write_text("x\n")
    with pytest.raises(UsageError, match=r"board-1\.pub: 'x' is not a CURVE key"):
        recorded(boards.inventory.device, tmp_path)


@pytest.mark.slow
def test_the_command_shows_who_has_none(boards: ssh_boards.Boards, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "show", "--cluster", str(boards.file), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["boards"]
    assert [board["name"] for board in told] == ["board-0", "board-1"]
    assert all("cannot read the key file /etc/flowspec/board.key" in board["error"] for board in told)
    assert main(["keys", "show", "--cluster", str(boards.file)]) == 1
    assert capsys.readouterr().out.count("✗ board-") == 2
