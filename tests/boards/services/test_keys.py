"""The boards' public keys over a real ssh: asked for, recorded, and changed on all of them or on none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits import ssh_boards

from flowspec_edge.boards.commands import SshRunner, as_root
from flowspec_edge.boards.services.keys import (
    BoardKey,
    change_keys,
    held_keys,
    record,
    recorded,
    rotate_keys,
    shown,
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


def make(boards: ssh_boards.Boards, here: Path, **actions: str) -> list[BoardKey]:
    """Have every board make its pair, but for those with another action."""
    devices = boards.inventory.device
    wanted: Any = {device.name: actions.get(device.name.replace("-", "_"), "make") for device in devices}
    return change_keys(boards.inventory, devices, pythons(boards), wanted, here, PATH)


def test_keys_are_made_once_recorded_and_compared(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    inventory, devices, here = boards.inventory, boards.inventory.device, tmp_path / "keys"
    for place in range(2):
        on(boards, place, "rm", "-rf", "/run/flowspec")
    found = make(boards, here)
    assert [(key.name, key.made, key.error) for key in found] == [
        (f"board-{place}", True, "") for place in range(2)]
    publics = {key.name: key.public for key in found}
    assert len(set(publics.values())) == 2
    assert recorded(devices, here) == publics
    assert (here / "board-1.pub").stat().st_mode & 0o777 == 0o644
    for place in range(2):
        secret = json.loads(on(boards, place, "cat", PATH))["secret"]
        assert all(secret not in file.read_text() for file in here.iterdir())
        assert on(boards, place, "stat", "-c", "%a %U", PATH).split() == ["400", "root"]

    again = make(boards, here)
    assert {key.name: key.public for key in again} == publics
    assert not any(key.made for key in again)

    on(boards, 1, "rm", PATH)
    changed = make(boards, here)
    assert [bool(key.error) for key in changed] == [False, True]
    assert changed[1].error.startswith("board-1: its key has changed: it has ")
    assert f"{here / 'board-1.pub'} says {publics['board-1'][:10]}…: if you replaced" in changed[1].error
    assert recorded(devices, here) == publics
    assert shown(inventory, devices, pythons(boards), here, PATH)[1].error == changed[1].error
    (here / "board-1.pub").unlink()
    assert not any(key.error for key in make(boards, here))


def test_all_keys_are_changed_or_none(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    inventory, devices, here = boards.inventory, boards.inventory.device, tmp_path / "keys"
    make(boards, here)
    before = recorded(devices, here)
    calls: list[dict[str, str]] = []

    def now() -> dict[str, str]:
        """What the boards have."""
        return {key.name: key.public for key in shown(inventory, devices, pythons(boards), tmp_path, PATH)}

    def apply() -> None:
        calls.append(recorded(devices, here))
        raise FlowspecError("not ready")

    def kept() -> dict[str, str]:
        return {device.name: json.loads(on(boards, place, "cat", f"{PATH}.old"))["public"]
                for place, device in enumerate(devices)}

    def restore() -> bool:
        calls.append(kept())  # what ran before needs these pairs
        return len(calls) > 2

    with pytest.raises(FlowspecError, match="not ready"):
        rotate_keys(inventory, devices, pythons(boards), here, apply, restore, PATH)
    assert calls[0].keys() == before.keys()
    assert not set(calls[0].values()) & set(before.values())
    assert calls[1] == kept() == before  # not restored: both pairs stay
    assert calls[0] == recorded(devices, here) == now()
    assert held_keys(inventory, devices, pythons(boards), PATH) == {
        name: {public, before[name]} for name, public in calls[0].items()}
    record(here, before)
    make(boards, here, board_0="undo", board_1="undo")

    with pytest.raises(FlowspecError, match="not ready"):
        rotate_keys(inventory, devices, pythons(boards), here, apply, restore, PATH)
    assert calls[3] == recorded(devices, here) == now() == before

    without = {**pythons(boards), "board-1": "/usr/bin/false"}
    with pytest.raises(FlowspecError, match=r"^board-1 \(.*\): exit code 1$"):
        rotate_keys(inventory, devices, without, here, lambda: None, lambda: True, PATH)
    assert recorded(devices, here) == now() == before

    publics = rotate_keys(inventory, devices, pythons(boards), here, lambda: None, lambda: True, PATH)
    assert recorded(devices, here) == now() == publics
    assert not set(publics.values()) & set(before.values())
    for place in range(2):
        assert on(boards, place, "ls", "/run/flowspec").split() == ["board.key"]


def test_a_failed_rotation_that_is_cut_off_is_taken_back_by_the_next_up(boards: ssh_boards.Boards, tmp_path: Path
                                                                        ) -> None:
    """No board can be asked once the release before runs again."""
    inventory, devices, here = boards.inventory, boards.inventory.device, tmp_path / "keys"
    make(boards, here)
    before, told = recorded(devices, here), pythons(boards)

    def apply() -> None:
        told.update(dict.fromkeys(told, "/usr/bin/false"))
        raise FlowspecError("not ready")

    with pytest.raises(FlowspecError, match="not ready"):
        rotate_keys(inventory, devices, told, here, apply, lambda: True, PATH)
    assert recorded(devices, here) == before  # so `up` undoes
    assert not any(key.error for key in make(boards, here, board_0="undo", board_1="undo"))
    assert held_keys(inventory, devices, pythons(boards), PATH) == {
        name: {public} for name, public in before.items()}


@pytest.mark.slow
def test_a_rotation_cut_off_by_a_power_failure(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    """Board 0 missed the order to settle, board 1 everything after its new pair."""
    inventory, devices, here = boards.inventory, boards.inventory.device, tmp_path / "keys"
    make(boards, here)
    program = [sys.executable, "-m", "flowspec_edge.boards.services.board_key"]
    told = [json.loads(on(boards, place, *program, "rotate", PATH)) for place in range(2)]
    record(here, {"board-0": told[0]["public"]})
    found = make(boards, here, board_1="undo")
    assert [(key.public, key.made, key.error) for key in found] == [
        (told[0]["public"], False, ""), (told[1]["before"], True, "")]
    assert {key.name: key.public for key in found} == recorded(devices, here)
    assert on(boards, 0, "ls", "/run/flowspec").split() == ["board.key", "board.key.old"]
    assert on(boards, 1, "ls", "/run/flowspec").split() == ["board.key"]

    def apply() -> None:
        raise FlowspecError("not ready")

    with pytest.raises(FlowspecError, match="not ready"):  # back to the recorded pair, not the one before
        rotate_keys(inventory, devices, pythons(boards), here, apply, lambda: True, PATH)
    found = make(boards, here)
    assert [(key.public, key.before, key.error) for key in found] == [
        (told[0]["public"], "", ""), (told[1]["before"], "", "")]


def test_a_board_that_cannot_be_asked_is_named(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    devices = boards.inventory.device
    found = change_keys(boards.inventory, devices, {**pythons(boards), "board-1": "/nowhere"},
                        {device.name: "make" for device in devices}, tmp_path, PATH)
    assert [key.error.split(" (")[0] for key in found] == ["", "board-1"]
    assert recorded(devices, tmp_path).keys() == {"board-0"}
    found = shown(boards.inventory, devices, {**pythons(boards), "board-1": "/usr/bin/true"}, tmp_path, PATH)
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
