"""Finished parts of a model: a directory appears under its name only when it is complete.

Does not know what is in a part.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from flowspec_edge.errors import UsageError


def make_directory(path: Path) -> None:
    """``path`` and what is above it; UsageError if a file is in the way or it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"cannot make the directory {path}: {reason}; give another one") from error


def bind(path: Path, wanted: dict[str, Any], what: str) -> None:
    """Bind a work directory to ``wanted`` by the file ``path`` in it, so that no two recipes mix.

    UsageError if it is bound to something else; ``what`` says of what it holds the work then.
    """
    wanted = json.loads(json.dumps(wanted))  # as it is read back: tuples become lists
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(wanted, indent=1))
        os.replace(partial, path)
    elif json.loads(path.read_text()) != wanted:
        raise UsageError(f"{path.parent} holds the work of {what}; give another --work, or delete it")


def claim_part(path: Path) -> None:
    """UsageError now, and not after hours of work, if :func:`make_part` could not write ``path``."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"cannot make the directory {path}: a file is in the way; give another one")
    make_directory(_partial(path))
    shutil.rmtree(_partial(path))


def make_part(console: Console, path: Path, part: Callable[[Path], None]) -> None:
    """Let ``part`` write into a directory beside ``path``, then give it that name.

    What is there already is left alone.
    """
    if path.is_dir():
        console.print(f"{path} is finished already; going on")
        return
    partial = _partial(path)
    shutil.rmtree(partial, ignore_errors=True)
    part(partial)
    for file in partial.rglob("*"):
        file.chmod(0o644)  # safetensors leaves its files to their owner alone
    os.replace(partial, path)
    console.print(f"{path} is finished")


def _partial(path: Path) -> Path:
    return path.with_name(f".partial-{path.name}")
