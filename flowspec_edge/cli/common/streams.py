"""The standard streams of a command, and what the system refuses to write.

Streams may be closed, lack a character in their encoding or lie on a full disk; a file may be refused.  Standard
output is the command's result, so what it cannot take is an error.  Standard error has notes and progress, so what
it cannot take is dropped: a full disk under a log must not cost the result.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowspec_edge.errors import FlowspecError

# Of writes that fail for the sake of the file system, not of the program; the rest are bugs.
_NO_ROOM = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some space", errno.EFBIG: "see ulimit -f",
            errno.EROFS: "choose another place", errno.EIO: "see the kernel's log (dmesg)",
            errno.EBADF: "it is not open for writing"}
# Of paths that a user gave, to be read or written.
_NO_ACCESS = {errno.EACCES: "see its permissions and those of its directories, or choose another place",
              errno.EPERM: "see its permissions and attributes (lsattr), or choose another place",
              errno.ENOTDIR: "a part of the path is a file", errno.EISDIR: "name a file in it",
              errno.ENAMETOOLONG: "choose a shorter name", errno.ELOOP: "its links go in a circle"}


_unsaved: dict[Path, FlowspecError] = {}


class _Dropping(io.FileIO):
    """A stream that reports what it could not write as written."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(data)


def prepare_streams() -> None:
    """Raise FlowspecError if standard output is closed: the result would be lost after the work."""
    if sys.stdin is None:
        _fill(0, os.O_RDONLY)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the whole process
    output_is_closed = sys.stdout is None
    if output_is_closed:
        _fill(1, os.O_WRONLY)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        _fill(2, os.O_WRONLY)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is sys.__stderr__ or sys.__stderr__ is None:
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Dropping(2, "w", closefd=False)),
                                      sys.stderr.encoding, "backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # "\u4e2d" for a character that Latin-1 lacks
    if output_is_closed:
        raise FlowspecError("standard output is closed: send it to a file, or to /dev/null")


def saved(path: Path, save: Callable[[], None]) -> bool:
    """Call ``save``, which writes a result to ``path``, and return whether it succeeded.

    If not, the command goes on and shows its result; then its end is the error, unless a later call for ``path`` has
    succeeded.
    """
    _unsaved.pop(path, None)
    try:
        save()
    except FlowspecError as error:
        _unsaved[path] = error
    return path not in _unsaved


def raise_unsaved() -> None:
    """Raise the first error of :func:`saved`, at the end of a command."""
    errors = [*_unsaved.values()]
    _unsaved.clear()
    if errors:
        raise errors[0]


def refused_file(error: OSError) -> FlowspecError | None:
    """Return the line for a file system that takes no more, or that refuses a path; None for another error."""
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
    if error.errno in _NO_ROOM:
        target = path or "the output"
        return FlowspecError(f"cannot write {target}: {error.strerror}: {_NO_ROOM[error.errno]}")
    if error.errno in _NO_ACCESS and path:
        return FlowspecError(f"cannot use {path}: {error.strerror}: {_NO_ACCESS[error.errno]}")
    return None


def end_output() -> None:
    """Write what is left, or forget it, after a command has failed.

    The interpreter's end would fail on it again.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            _fill(sys.stdout.fileno(), os.O_WRONLY)


def _fill(number: int, flags: int) -> None:
    """Open a descriptor that was closed, so that no other file takes its number."""
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
