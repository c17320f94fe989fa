"""The public keys of a cluster's boards: told by the boards over ssh, kept in a directory here.

Knows that a board's key is not to change unnoticed, and how all of them change together.  Does not know
the private halves, which never leave their boards (``board_key``), nor what the keys are for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.commands import as_root
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.places import KEY
from flowspec_edge.fleet.ssh import runner_for
from flowspec_edge.transport.keys import parse_public

Action = Literal["make", "show", "rotate", "undo", "settle"]
_SHOWN = 10  # characters of a key, of 40, that tell it from another


@dataclass(frozen=True)
class BoardKey:
    """One board.

    public  its public key, Z85; "" if it could not be had
    made    whether its pair was made just now, or another in its place
    error   one line that names the board; "" if all is well
    """

    name: str
    public: str = ""
    made: bool = False
    error: str = ""


def recorded(devices: Sequence[DeviceEntry], directory: Path) -> dict[str, str]:
    """The public keys that ``directory`` has, by board; UsageError for a file that holds none."""
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


def collect(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
            directory: Path, path: str = KEY) -> list[BoardKey]:
    """Every board's public key, in their order; a board without a pair makes one.

    pythons    the interpreter on each board that has flowspec, by name
    directory  where the keys are recorded; a board whose key is not the recorded one is an error
    path       of the pair, on every board

    UsageError for a record that is no key.
    """
    known = recorded(devices, directory)
    found = _ask(inventory, devices, pythons, "make", path)
    checked = [_compared(board, known, directory) for board in found]
    record(directory, {board.name: board.public for board in checked
                       if not board.error and board.name not in known})
    return checked


def shown(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
          directory: Path, path: str = KEY) -> list[BoardKey]:
    """The same, and nothing is made or recorded: a board without a pair is an error."""
    known = recorded(devices, directory)
    return [_compared(board, known, directory)
            for board in _ask(inventory, devices, pythons, "show", path)]


def rotate_keys(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
                directory: Path, apply: Callable[[], None], restore: Callable[[], None],
                path: str = KEY) -> dict[str, str]:
    """Another key pair on every board; the public keys, by name.

    apply    called when every board has its pair and ``directory`` has the public keys: brings these to the
             boards' configurations, and has the services load the pairs anew
    restore  called when that has raised and all boards have their former pairs back, as has ``directory``:
             has the services load those anew

    FlowspecError that names every board on which it fails; then, as when ``apply`` raises, which is raised
    on, no board keeps a new pair that it could be reached to take back.
    """
    before = recorded(devices, directory)
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
        _take_back(inventory, devices, pythons, directory, before, path)
        restore()
        raise
    _require(_ask(inventory, devices, pythons, "settle", path))
    return publics


def record(directory: Path, publics: Mapping[str, str]) -> None:
    """Write the public keys, each file whole or not at all; FlowspecError if that is not to be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, public in publics.items():
            with NamedTemporaryFile("w", dir=directory, prefix=".", encoding="ascii", delete=False) as file:
                file.write(f"{public}\n")
            os.chmod(file.name, 0o644)
            os.replace(file.name, _file(directory, name))
    except OSError as error:
        raise FlowspecError(f"cannot record the boards' keys in {directory}: {error.strerror}") from error


def forget(directory: Path, names: Iterable[str]) -> None:
    """Boards that have no key any more are to be new ones when they come again; FlowspecError if a file
    cannot be removed."""
    try:
        for name in names:
            _file(directory, name).unlink(missing_ok=True)
    except OSError as error:
        raise FlowspecError(f"cannot remove {error.filename}: {error.strerror}") from error


def _take_back(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
               directory: Path, before: Mapping[str, str], path: str) -> None:
    """As it was, on every board that can be reached, and here."""
    _ask(inventory, devices, pythons, "undo", path)
    forget(directory, (device.name for device in devices if device.name not in before))
    record(directory, before)


def _ask(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str], action: Action,
         path: str) -> list[BoardKey]:
    """All boards at once."""
    def one(device: DeviceEntry) -> BoardKey:
        command = [pythons[device.name], "-m", "flowspec_edge.fleet.board_key", action, path]
        try:
            runner = runner_for(inventory, device)
            told = json.loads(runner.run(as_root(command)))
            return BoardKey(device.name, parse_public(told["public"]).decode(), bool(told["changed"]))
        except FlowspecError as error:
            return BoardKey(device.name, error=str(error))
        except (ValueError, KeyError, TypeError):
            return BoardKey(device.name, error=f"{device.name}: {command[0]} is not a flowspec that this one "
                                               "understands: flowspec deploy up")

    with ThreadPoolExecutor(max(1, len(devices))) as pool:
        return list(pool.map(one, devices))


def _compared(board: BoardKey, known: Mapping[str, str], directory: Path) -> BoardKey:
    expected = known.get(board.name, board.public)
    if board.error or board.public == expected:
        return board
    return BoardKey(board.name, error=(
        f"{board.name}: its key has changed: it has {board.public[:_SHOWN]}…, and "
        f"{_file(directory, board.name)} says {expected[:_SHOWN]}…: if you replaced the board or set it up "
        "anew, remove that file; else change all keys with: flowspec keys rotate"))


def _require(boards: Sequence[BoardKey]) -> None:
    if errors := [board.error for board in boards if board.error]:
        raise FlowspecError("; ".join(errors))


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name}.pub"
