"""This board's own key pair: made here, changed here; only its public half is ever told.

Knows one file, its older life beside it, and that a half-done change can be taken back.  Does not know
who is told the public key.  To be run as root:

    python -m flowspec_edge.fleet.board_key make|show|rotate|undo|settle PATH

writes {"public": …, "changed": …} to stdout.
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

_MODE = 0o400


def make(path: Path) -> bool:
    """A pair at ``path``, unless there is one; whether there was none."""
    if path.exists():
        return False
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        keys.save(keys.generate(), path, _MODE)
    except UsageError:
        if path.exists():  # another run was quicker
            return False
        raise
    return True


def show(path: Path) -> bool:
    """Changes nothing."""
    return False


def rotate(path: Path) -> bool:
    """Another pair at ``path``.  The one before is kept until :func:`settle`; if a change before this one
    was not settled, the one that is kept stays the one that others know."""
    keys.load(path)
    if not _old(path).exists():
        os.link(path, _old(path))
    keys.save(keys.generate(), path, _MODE, replace=True)
    return True


def undo(path: Path) -> bool:
    """The pair before :func:`rotate` is back; whether there was one."""
    if not _old(path).exists():
        return False
    os.replace(_old(path), path)
    return True


def settle(path: Path) -> bool:
    """The pair before :func:`rotate` is gone for good; whether there was one."""
    there = _old(path).exists()
    _old(path).unlink(missing_ok=True)
    return there


ACTIONS: dict[str, Callable[[Path], bool]] = {
    action.__name__: action for action in (make, show, rotate, undo, settle)}


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def main() -> int:
    """The command line; an error is one line on stderr."""
    parser = argparse.ArgumentParser(description="This board's key pair for the links of a cluster.")
    parser.add_argument("action", choices=[*ACTIONS])
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    try:
        changed = ACTIONS[arguments.action](arguments.path)
        public = keys.load(arguments.path).public.decode()
    except FlowspecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{arguments.path}: {error.strerror}", file=sys.stderr)
        return 1
    print(json.dumps({"public": public, "changed": changed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
