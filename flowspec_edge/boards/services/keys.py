"""The boards' public keys: read over ssh, recorded in a directory here, rotated together.

A board whose key differs from the record is an error, as with ssh's known_hosts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowspec_edge.boards.commands import as_root, on_each, runner_for
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.paths import KEY
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.transport.keys import parse_public
from flowspec_edge.util.files import write_atomically
from flowspec_edge.util.interpreter import module_command

KeyAction = Literal["make", "show", "rotate", "undo", "settle"]
_SHOWN = 10  # of 40 characters: enough to tell keys apart


@dataclass(frozen=True)
class BoardKey:
    name: str
    public: str = ""  # Z85; "" if it could not be read
    made: bool = False  # made or replaced by this call
    before: str = ""  # public key of the pair that an unsettled rotation keeps
    error: str = ""  # one line that names the board


def recorded(devices: Sequence[DeviceEntry], directory: Path) -> dict[str, str]:
    """The public keys in ``directory``, by board; UsageError for a file that holds no key."""
    found = {}
    for device in devices:
        file = _file(directory, device.name)
        try:
            text = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}: {error}") from error
        try:
            found[device.name] = parse_public(text).decode()
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
    return found


def change_keys(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
                actions: Mapping[str, KeyAction], directory: Path, path: str = KEY) -> list[BoardKey]:
    """Make missing pairs, undo interrupted rotations, and record new public keys in ``directory``.

    ``pythons``: the interpreter with flowspec, by board; ``path``: of the pair on every board.  Returns the
    keys in the order of ``devices``; a key that differs from its record is an error there.  UsageError for a
    damaged record.
    """
    known = recorded(devices, directory)
    checked = [_compared(board, known, directory)
               for board in _ask(inventory, devices, pythons, actions, path)]
    record(directory, {board.name: board.public for board in checked
                       if not board.error and board.name not in known})
    return checked


def shown(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
          directory: Path, path: str = KEY) -> list[BoardKey]:
    """Every board's public key, read only; a board without a pair is an error."""
    known = recorded(devices, directory)
    return [_compared(board, known, directory)
            for board in _ask(inventory, devices, pythons, "show", path)]


def rotate_keys(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
                directory: Path, apply: Callable[[], None], restore: Callable[[], bool],
                path: str = KEY) -> dict[str, str]:
    """Replace the key pair of every board; the new public keys, by board.

    apply    called once every board has its new pair and ``directory`` the public keys: writes them to the
             boards' configurations, and has the services load the new pairs
    restore  called after ``apply`` raised, while boards have both pairs: returns all boards to what ran
             before; whether it could

    On a failure every board that can be reached gets its former pair back, unless a board may still need the
    new one: then both stay, for another run.  FlowspecError names the boards that failed; an exception of
    ``apply`` is raised again.
    """
    before = recorded(devices, directory)
    settle(inventory, devices, pythons, directory, path)
    try:
        turned = _ask(inventory, devices, pythons, "rotate", path)
        _require(turned)
        publics = {board.name: board.public for board in turned}
        record(directory, publics)
    except BaseException:
        _take_back(inventory, devices, pythons, directory, before, path)
        raise
    try:
        apply()
    except BaseException:
        if restore():
            _take_back(inventory, devices, pythons, directory, before, path)
        raise
    _require(_ask(inventory, devices, pythons, "settle", path))
    return publics


def is_half_rotated(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
                    path: str = KEY) -> bool:
    """Whether a rotation was interrupted: a board still keeps its former pair."""
    return any(board.before for board in _ask(inventory, devices, pythons, "show", path))


def held_keys(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
              path: str = KEY) -> dict[str, set[str]]:
    """The public keys of the pairs that each board has: the former one, too, while a rotation has not ended.
    FlowspecError names the boards that do not say."""
    found = _ask(inventory, devices, pythons, "show", path)
    _require(found)
    return {board.name: {board.public, board.before} - {""} for board in found}


def settle(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
           directory: Path, path: str = KEY) -> None:
    """End a rotation interrupted after its keys were in use; FlowspecError names boards that failed."""
    known = recorded(devices, directory)
    half = {board.name for board in _ask(inventory, devices, pythons, "show", path)
            if board.before and board.public == known.get(board.name)}
    _require(_ask(inventory, [device for device in devices if device.name in half], pythons, "settle", path))


def record(directory: Path, publics: Mapping[str, str]) -> None:
    """Write the public keys, each file atomically; FlowspecError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, public in publics.items():
            write_atomically(_file(directory, name), f"{public}\n", 0o644)
    except OSError as error:
        raise FlowspecError(f"cannot record the boards' keys in {directory}: {error.strerror}") from error


def forget(directory: Path, names: Iterable[str]) -> None:
    """Remove the records of these boards; FlowspecError if a file cannot be removed."""
    try:
        for name in names:
            _file(directory, name).unlink(missing_ok=True)
    except OSError as error:
        raise FlowspecError(f"cannot remove {error.filename}: {error.strerror}") from error


def _take_back(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
               directory: Path, before: Mapping[str, str], path: str) -> None:
    # Records first: if this is cut off, the next `up` finds a recorded former pair, and takes the rest back.
    forget(directory, (device.name for device in devices if device.name not in before))
    record(directory, before)
    _ask(inventory, devices, pythons, "undo", path)


def _ask(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
         actions: Mapping[str, KeyAction] | KeyAction, path: str) -> list[BoardKey]:
    def one(device: DeviceEntry) -> BoardKey:
        action = actions if isinstance(actions, str) else actions[device.name]
        command = module_command("flowspec_edge.boards.services.board_key", action, path,
                                      python=pythons[device.name])
        try:
            runner = runner_for(inventory, device)
            told = json.loads(runner.run(as_root(command)))
            return BoardKey(device.name, parse_public(told["public"]).decode(), bool(told["changed"]),
                            parse_public(told["before"]).decode() if told.get("before") else "")
        except FlowspecError as error:
            return BoardKey(device.name, error=str(error))
        except (ValueError, KeyError, TypeError):
            return BoardKey(device.name, error=f"{device.name}: {command[0]} is not a compatible flowspec: "
                                               "flowspec deploy up")

    return on_each(one, devices)


def changed_key(name: str, public: str, known: Mapping[str, str], directory: Path) -> str:
    """One line for a board whose public key differs from its record; else ""."""
    expected = known.get(name, public)
    return "" if public == expected else (
        f"{name}: its key has changed: it has {public[:_SHOWN]}…, and {_file(directory, name)} says "
        f"{expected[:_SHOWN]}…: if you replaced the board or set it up anew, remove that file; else change "
        "all keys with: flowspec keys rotate")


def _compared(board: BoardKey, known: Mapping[str, str], directory: Path) -> BoardKey:
    error = "" if board.error else changed_key(board.name, board.public, known, directory)
    return BoardKey(board.name, error=error) if error else board


def _require(boards: Sequence[BoardKey]) -> None:
    if errors := [board.error for board in boards if board.error]:
        raise FlowspecError("; ".join(errors))


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name}.pub"
