"""The boards' public keys: read over ssh, recorded in a directory here.

A board whose key differs from the record is an error, as with ssh's known_hosts.

A board has a *set* of key pairs, and each release names the pair that it needs on every board.  So `keys rotate`
is an `up` of a release that needs other pairs:

1. Each board adds a pair to its set, and the new public keys are recorded here.  What runs is not disturbed.
2. The release with the new keys is deployed like any other.  If it fails, the release before still has its pairs.
3. Each board removes the pairs that its release does not need.

Nothing has to be undone after an interruption: each step leaves what the steps before it have done, and the
next `rotate` or `up` goes on from the boards' sets and the records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowspec_edge.boards.commands import as_root, on_each, runner_for
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.paths import KEY
from flowspec_edge.boards.probe.findings import in_one_line
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.transport.keys import parse_public
from flowspec_edge.util.files import write_atomically
from flowspec_edge.util.interpreter import module_command

KeyAction = Literal["make", "show", "add", "keep"]
_SHOWN = 10  # of 40 characters: enough to tell keys apart


@dataclass(frozen=True)
class BoardKeys:
    name: str
    publics: tuple[str, ...] = ()  # Z85, the newest last; empty if they could not be read
    error: str = ""  # one line that names the board


def recorded(devices: Sequence[DeviceEntry], directory: Path) -> dict[str, str]:
    """Read the public keys in ``directory``, by board; raise UsageError for a file that holds no key."""
    keys = {}
    for device in devices:
        file = _file(directory, device.name)
        try:
            text = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}: {error}") from error
        try:
            keys[device.name] = parse_public(text).decode()
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
    return keys


def record(directory: Path, publics: Mapping[str, str]) -> None:
    """Write the public keys, each file atomically; raise FlowspecError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, public in publics.items():
            write_atomically(_file(directory, name), f"{public}\n", 0o644)
    except OSError as error:
        raise FlowspecError(f"cannot record the boards' keys in {directory}: {error.strerror}") from error


def forget(directory: Path, names: Iterable[str]) -> None:
    """Remove the records of these boards; raise FlowspecError if a file cannot be removed."""
    try:
        for name in names:
            _file(directory, name).unlink(missing_ok=True)
    except OSError as error:
        raise FlowspecError(f"cannot remove {error.filename}: {error.strerror}") from error


def key_to_use(publics: Sequence[str], recorded_key: str, running: str = "") -> str:
    """Return the key of a board, which has ``publics``, that a release is to need.

    It is the recorded key ``recorded_key``, unless the board lacks that one, or its ``running`` release needs a newer
    one: the records, of another machine, are then out of date (``changed_key``).
    """
    usable = publics[publics.index(running) if running in publics else 0:]
    return recorded_key if recorded_key in usable else usable[0]


def rotation(publics: Mapping[str, Sequence[str]], recorded_keys: Mapping[str, str]) -> dict[str, KeyAction]:
    """Decide what each board does at the beginning of a rotation; the arguments are by board.

    The new keys are recorded once all boards have them.  So if the newest keys are recorded and a board still
    has an older one, an interrupted rotation is past this step, and goes on.
    """
    goes_on = (any(len(board_keys) > 1 for board_keys in publics.values())
               and all([*board_keys[-1:]] == [recorded_keys.get(name)] for name, board_keys in publics.items()))
    return {name: "make" if not board_keys else "show" if goes_on or len(board_keys) > 1 else "add"
            for name, board_keys in publics.items()}


def changed_key(name: str, public: str, recorded_keys: Mapping[str, str], directory: Path) -> str:
    """Return one line for a board whose public key differs from its record; else ""."""
    expected = recorded_keys.get(name, public)
    return "" if public == expected else (
        f"{name}: its key has changed: it has {public[:_SHOWN]}…, and {_file(directory, name)} says "
        f"{expected[:_SHOWN]}…: if you replaced the board or set it up anew, remove that file; else change "
        "all keys with: flowspec keys rotate")


def public_keys(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
                directory: Path, path: str = KEY) -> list[BoardKeys]:
    """Return every board's public key, the one that is to be used.

    A board without a pair of keys is an error, and so is a board whose key differs from its record.
    """
    recorded_keys = recorded(devices, directory)
    boards = []
    for board in ask(inventory, devices, pythons, "show", path):
        if not board.error:
            public = key_to_use(board.publics, recorded_keys.get(board.name, ""))
            error = changed_key(board.name, public, recorded_keys, directory)
            board = BoardKeys(board.name, () if error else (public,), error)
        boards.append(board)
    return boards


def board_public_keys(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
                      path: str = KEY) -> dict[str, tuple[str, ...]]:
    """Return the public keys of the pairs that each board has; FlowspecError names the boards that do not say."""
    boards = ask(inventory, devices, pythons, "show", path)
    if errors := [board.error for board in boards if board.error]:
        raise FlowspecError("; ".join(errors))
    return {board.name: board.publics for board in boards}


def ask(inventory: Inventory, devices: Sequence[DeviceEntry], pythons: Mapping[str, str],
        actions: Mapping[str, KeyAction] | KeyAction, path: str = KEY) -> list[BoardKeys]:
    """Have boards change their sets of pairs, and return the sets in the order of ``devices``.

    pythons  the interpreter with flowspec, by board
    actions  by board, or the same for all
    path     of the key file on every board
    """
    def ask_board(device: DeviceEntry) -> BoardKeys:
        action = actions if isinstance(actions, str) else actions[device.name]
        command = key_command(pythons[device.name], action, path)
        try:
            answer = json.loads(runner_for(inventory, device).run(as_root(command)))
            publics = answer["publics"] if "publics" in answer else [answer["public"]]  # of an earlier flowspec
            return BoardKeys(device.name, tuple(parse_public(public).decode() for public in publics))
        except FlowspecError as error:
            return BoardKeys(device.name, error=in_one_line(device, error))
        except (ValueError, KeyError, TypeError):
            return BoardKeys(device.name, error=f"{device.name}: {command[0]} is not a compatible flowspec: "
                                                "flowspec deploy up")

    return on_each(ask_board, devices)


def key_command(python: str, action: KeyAction, path: str, public: str = "") -> list[str]:
    """Return the command that runs ``board_key`` with a board's interpreter; ``public``: of the pair to keep."""
    key_arguments = [f"--public={public}"] if public else []  # in one word: a key may begin with a hyphen
    return module_command("flowspec_edge.boards.services.board_key", action, path, *key_arguments, python=python)


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name}.pub"
