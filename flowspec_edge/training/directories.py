"""Output and work directories: a part gets its final name only when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from flowspec_edge.errors import UsageError
from flowspec_edge.util.bounded_read import read_json
from flowspec_edge.util.files import publish, write_atomically


def make_directory(path: Path) -> None:
    """UsageError if ``path`` cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"cannot make the directory {path}: {reason}; give another one") from error


def bind(path: Path, wanted: dict[str, Any], what: str) -> None:
    """Bind a work directory to ``wanted``; UsageError if the file ``path`` in it says otherwise."""
    wanted = json.loads(json.dumps(wanted))  # as a reader gets it: tuples become lists
    if not path.exists():
        write_atomically(path, json.dumps(wanted, indent=1))
    elif read_json(path) != wanted:
        raise UsageError(f"{path.parent} holds the work of {what}; give another --work, or delete it")


def claim_part(path: Path) -> None:
    """UsageError, before hours of work, if ``make_part`` cannot write ``path``."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"cannot make the directory {path}: a file is in the way; give another one")
    make_directory(_partial(path))
    shutil.rmtree(_partial(path))


def make_part(console: Console, path: Path, part: Callable[[Path], None]) -> None:
    """``part`` writes into a temporary directory, which is renamed to ``path``; keeps an existing one."""
    if path.is_dir():
        console.print(f"{path} is finished already; going on", markup=False)
        return
    partial = _partial(path)
    shutil.rmtree(partial, ignore_errors=True)
    part(partial)
    for file in partial.rglob("*"):
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    publish(partial, path)
    console.print(f"{path} is finished", markup=False)


def _partial(path: Path) -> Path:
    return path.with_name(f".partial-{path.name}")
