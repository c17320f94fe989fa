"""Files that appear when they are whole, and what the disk may have against them.

Knows renaming, syncing and the errors of writing.  Does not know what is in a file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowspec_edge.errors import FlowspecError, UsageError

Progress = Callable[[int], None]  # called with the bytes done since the last call

PARTIAL = ".partial"
_BLOCK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def partial_of(path: Path) -> Path:
    """Where a file lies while it is written."""
    return path.with_name(path.name + PARTIAL)


def publish(path: Path) -> None:
    """Give a partial file that is whole and synced its name, and have the directory remember it."""
    with writing(path):
        os.replace(partial_of(path), path)
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Have renames in ``directory`` survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file; it is there whole, or not at all."""
    with _partial(path) as partial, writing(path):
        partial.write_bytes(data)
        _sync(partial)


def copy_whole(source: Path, path: Path, progress: Progress | None = None) -> None:
    """Copy a file block by block; it is there whole, or not at all."""
    with _partial(path) as partial:
        try:
            reader = source.open("rb")
        except OSError as error:
            raise FlowspecError(f"cannot read {source}: {error.strerror}") from error
        with reader, writing(path):
            with partial.open("wb") as target:
                while block := reader.read(_BLOCK):
                    target.write(block)
                    if progress is not None:
                        progress(len(block))
            _sync(partial)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a FlowspecError that says what to do about ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FlowspecError(f"no room to write {path} ({error.strerror}): make room, and run the same "
                                "command again to go on") from error
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A partial file, published at the end, removed after an exception."""
    partial = partial_of(path)
    try:
        yield partial
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    publish(path)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
