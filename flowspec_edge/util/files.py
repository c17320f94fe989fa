"""Durable, atomic file writes: readers see the old content or the new, also after a power failure.

Standard library and Python 3.8 syntax only: boards run this before a release is installed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from flowspec_edge.errors import UsageError

PARTIAL = ".partial"  # suffix of a file that is being written


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock on ``path``, which is made if needed; it ends with the process.

    UsageError: ``busy`` if another process holds it, or if the file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(busy) from None
        yield


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


@contextmanager
def replacing(path: Path, mode: int | None = None, replace: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that becomes ``path``, synced, in one step at the end of the block.

    After an exception ``path`` is unchanged. An OSError of the new file names ``path``.

    mode     permissions, which hold from the file's creation on; None: umask
    replace  False: FileExistsError for an existing file
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(partial, flags, 0o666 if mode is None else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        (os.replace if replace else os.link)(partial, path)
    except OSError as error:
        if error.filename in (None, str(partial)):  # a write without room names no file
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # it may never have been made
            partial.unlink()
    sync_directory(path.parent)


def write_atomically(path: Path, data: str | bytes, mode: int | None = None, replace: bool = True
                     ) -> None:
    """:func:`replacing` with ``data`` (text as UTF-8)."""
    with replacing(path, mode, replace) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


def write_output(path: Path, data: str | bytes) -> None:
    """Write a file that the user named, or the file that a link of this name points to; UsageError if that fails."""
    try:
        write_atomically(path.resolve(), data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Raise UsageError if :func:`write_output` would fail; does not change ``path``."""
    try:
        target = path.resolve()
        if target.is_dir() or (target.exists() and not target.is_file()):
            raise UsageError(f"cannot write {path}: it is not an ordinary file")
        if not target.parent.is_dir():
            raise UsageError(f"cannot write {path}: no directory {path.parent}; make it first")
        _probe(target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def make_directory(path: Path, option: str = "") -> None:
    """Make ``path`` unless it is there; UsageError if that fails, or if no file can be made in it.

    option  the option that names it, such as "--work"
    """
    advice = f"give another {option or 'one'}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"cannot make the directory {path}: a file is in the way; {advice}") from None
    except OSError as error:
        raise UsageError(f"cannot make the directory {path}: {error.strerror}; {advice}") from error
    try:
        _probe(path / "file")
    except OSError as error:
        raise UsageError(f"cannot write into the directory {path}: {error.strerror}; {advice}") from error


def _probe(path: Path) -> None:
    """OSError if a file cannot be made where :func:`replacing` makes that of ``path``."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    probe.touch(exist_ok=False)
    probe.unlink()
