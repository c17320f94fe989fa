"""The boards' public keys over a real ssh: asked for, recorded, compared, and rotated."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
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


class Rotation:
    """The steps of ``Rollout.up(rotate=True)`` that concern keys, on boards that run no services."""

    def __init__(self, boards: ssh_boards.Boards, here: Path) -> None:
        self.boards, self.here, self.devices = boards, here, boards.inventory.device

    def held(self) -> dict[str, tuple[str, ...]]:
        return board_public_keys(self.boards.inventory, self.devices, pythons(self.boards), PATH)

    def added(self, places: Sequence[int]) -> None:
        actions = rotation(self.held(), recorded(self.devices, self.here))
        ask(self.boards.inventory, [self.devices[place] for place in places], pythons(self.boards), actions, PATH)

    def recorded(self, places: Sequence[int]) -> None:
        held = self.held()
        record(self.here, {f"board-{place}": held[f"board-{place}"][-1] for place in places})

    def kept(self, places: Sequence[int]) -> None:
        known = recorded(self.devices, self.here)
        for place in places:
            on(self.boards, place, *key_command(sys.executable, "keep", PATH, known[f"board-{place}"]))

    def whole(self) -> None:
        for step in (self.added, self.recorded, self.kept):
            step(range(2))


@pytest.mark.slow
@pytest.mark.parametrize("reached", [1, 3, 5])
def test_a_rotation_goes_on_where_it_was_interrupted(boards: ssh_boards.Boards, tmp_path: Path, reached: int
                                                     ) -> None:
    """``reached``: after so many steps, of two boards one after the other; between any two: ``test_diff``."""
    rotated = Rotation(boards, tmp_path / "keys")
    before = {key.name: key_to_use(key.publics, "") for key in make(boards)}
    record(rotated.here, before)
    for number in range(reached):
        step = (rotated.added, rotated.recorded, rotated.kept)[number // 2]
        step([number % 2])
    held = rotated.held()
    known = recorded(rotated.devices, rotated.here)
    assert all(key_to_use(held[name], known[name], before[name]) == known[name] for name in known)
    if reached <= 4:  # the release before can run on all boards
        assert all(before[name] in held[name] for name in known)
    new = {name: keys[-1] for name, keys in held.items() if keys[-1] != before[name]}
    rotated.whole()
    after = recorded(rotated.devices, rotated.here)
    assert after == {**after, **new}  # no board made a third pair
    assert not set(after.values()) & set(before.values())
    assert rotated.held() == {name: (key,) for name, key in after.items()}
    for place in range(2):
        assert on(boards, place, "ls", "-A", "/run/flowspec").split() == ["board.key"]


def test_a_rotation_that_an_earlier_flowspec_left_half_way(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    """It had two files: the former pair, which its release may still need, in the second."""
    rotated = Rotation(boards, tmp_path / "keys")
    before = {key.name: key_to_use(key.publics, "") for key in make(boards)}
    record(rotated.here, before)
    on(boards, 1, "mv", PATH, f"{PATH}.old")
    make(boards)
    rotated.added(range(2))
    assert json.loads(on(boards, 1, "cat", f"{PATH}.old"))["public"] == before["board-1"]
    rotated.recorded(range(2))
    rotated.kept(range(2))
    after = recorded(rotated.devices, rotated.here)
    assert not set(after.values()) & set(before.values())
    assert rotated.held() == {name: (key,) for name, key in after.items()}
    assert on(boards, 1, "ls", "-A", "/run/flowspec").split() == ["board.key"]


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
