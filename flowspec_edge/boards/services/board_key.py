"""This board's CURVE key pair: made and rotated on the board; the private half never leaves it.

A rotation keeps the former pair until ``settle``.  Run as root:

    python -m flowspec_edge.boards.services.board_key make|show|rotate|undo|settle PATH

prints {"public": …, "changed": …, "before": …}; "before" is the public key of the kept pair, or null.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.transport import keys
from flowspec_edge.util.files import publish

_MODE = 0o400


def make(path: Path) -> bool:
    """Whether a pair was made; an existing one stays."""
    if path.exists():
        return False
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        keys.save(keys.generate(), path, _MODE)
    except UsageError:
        if path.exists():  # made by a concurrent run
            return False
        raise
    return True


def show(path: Path) -> bool:
    return False


def rotate(path: Path) -> bool:
    """Make another pair; keep the one that other boards know: the former, or an older one if unsettled."""
    keys.load(path)
    if not _old(path).exists():
        os.link(path, _old(path))
    keys.save(keys.generate(), path, _MODE, replace=True)
    return True


def undo(path: Path) -> bool:
    """Restore the kept pair; whether there was one."""
    if not _old(path).exists():
        return False
    publish(_old(path), path)
    return True


def settle(path: Path) -> bool:
    """Remove the kept pair; whether there was one."""
    there = _old(path).exists()
    _old(path).unlink(missing_ok=True)
    return there


ACTIONS: dict[str, Callable[[Path], bool]] = {
    action.__name__: action for action in (make, show, rotate, undo, settle)}


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def main() -> int:
    parser = argparse.ArgumentParser(description="This board's key pair for the links of a cluster.")
    parser.add_argument("action", choices=[*ACTIONS])
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    try:
        changed = ACTIONS[arguments.action](arguments.path)
        public = keys.load(arguments.path).public.decode()
        old = _old(arguments.path)
        before = keys.load(old).public.decode() if old.exists() else None
    except FlowspecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{arguments.path}: {error.strerror}", file=sys.stderr)
        return 1
    print(json.dumps({"public": public, "changed": changed, "before": before}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
