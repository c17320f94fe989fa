"""The CURVE key pairs of a board: made, added and removed on the board; the private halves never leave it.

A board has one pair, and a second one while keys are rotated.  Run as root:

    python -m flowspec_edge.boards.services.board_key make|show|add PATH
    python -m flowspec_edge.boards.services.board_key keep PATH --public=PUBLIC

prints {"publics": […]}: the public keys of its pairs, the newest last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from flowspec_edge.boards.paths import FORMER_KEY
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.transport import keys

_MODE = 0o400


def make(path: Path, public: str = "") -> None:
    """Make a pair if there is none."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        keys.save(keys.generate(), path, _MODE)
    except UsageError:
        if not path.exists():  # else a concurrent run has made it
            raise


def show(path: Path, public: str = "") -> None:
    """Change nothing."""


def add(path: Path, public: str = "") -> None:
    """Make a second pair, unless there are two already."""
    pairs = keys.load_all(path)
    if len(pairs) == 1:
        keys.save(pairs[0], path, _MODE, replace=True, newer=[keys.generate()])


def keep(path: Path, public: str) -> None:
    """Remove all pairs but the one with this public key."""
    pair = keys.load(path, public)
    if len(keys.load_all(path)) > 1:
        keys.save(pair, path, _MODE, replace=True)
    path.with_name(Path(FORMER_KEY).name).unlink(missing_ok=True)


ACTIONS: dict[str, Callable[[Path, str], None]] = {
    action.__name__: action for action in (make, show, add, keep)}


def main() -> int:
    parser = argparse.ArgumentParser(description="This board's key pairs for the links of a cluster.")
    parser.add_argument("action", choices=[*ACTIONS])
    parser.add_argument("path", type=Path)
    parser.add_argument("--public", default="", help="the pair that `keep` keeps")
    arguments = parser.parse_args()
    try:
        ACTIONS[arguments.action](arguments.path, arguments.public)
        publics = [pair.public.decode() for pair in keys.load_all(arguments.path)]
    except FlowspecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{arguments.path}: {error.strerror}", file=sys.stderr)
        return 1
    print(json.dumps({"publics": publics}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
