"""Durable, atomic file writes: readers see the old content or the new, also after a power failure.

Standard library and Python 3.8 syntax only: boards import this before a release is installed.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"  # suffix of a file that is being written


def sync_directory(path: Path) -> None:
    """Make renames, links and removals in ``path`` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(partial: Path, path: Path) -> None:
    """Rename ``partial``, complete and synced, to ``path`` in the same file system."""
    os.replace(partial, path)
    sync_directory(path.parent)


def write_atomically(path: Path, data: str | bytes, mode: int | None = None, replace: bool = True) -> None:
    """Write and sync ``data`` (text as UTF-8) in one step; after an OSError ``path`` is unchanged.

    mode     permissions, which hold from the file's creation on; None: umask
    replace  False: FileExistsError for an existing file
    """
    raw = data.encode("utf-8") if isinstance(data, str) else data
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        (os.replace if replace else os.link)(partial, path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    sync_directory(path.parent)
