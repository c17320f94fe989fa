"""Files that other programs wrote, read with a limit on size and on the depth of their data, or in pieces.

Every reader of JSON, TOML or a text uses these functions: a file without end (/dev/zero) or with 100,000
brackets is one line of error.

Files that are read once leave nothing in the page cache, with their sha256 as a by-product. A board's GPU
shares the system's memory, and CUDA on Tegra does not reliably get back what the page cache holds: the
cache would stand beside the weights that were read through it. ``posix_fadvise`` drops no pages of a
mapping, hence pread. Without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowspec_edge.errors import FlowspecError, UsageError

MAX_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 64  # of lists and objects in one another; a config.json has five


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a file; UsageError if it cannot be read or has more than ``most`` bytes."""
    try:
        with path.open("rb") as file:
            too_long = os.fstat(file.fileno()).st_size > most  # before gigabytes are read
            data = b"" if too_long else file.read(most + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"cannot read {path}: {error}") from error
    if too_long:
        raise _too_large(str(path), most)
    return bounded(data, str(path), most)


def bounded(data: bytes, source: str, most: int = MAX_BYTES) -> bytes:
    if len(data) > most:
        raise _too_large(source, most)
    return data


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    return as_text(read_bytes(path, most), str(path))


def as_text(data: bytes, source: str) -> str:
    """Decode ``data``; UsageError unless it is UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text: byte {error.start}") from error


def read_json(path: Path) -> Any:
    return parse_json(read_bytes(path), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return data


def parse_json(data: bytes | str, source: str) -> Any:
    """Parse ``data``; UsageError unless it is JSON of at most ``MAX_DEPTH`` levels."""
    text = as_text(data, source) if isinstance(data, bytes) else data
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise _too_deep(source) from error
    except ValueError as error:
        raise UsageError(f"{source} is not valid JSON: {error}") from error
    check_depth(value, source)
    return value


def check_depth(data: Any, source: str) -> None:
    level, depth = [data], 0
    while level:
        level = [inner for value in level if isinstance(value, (dict, list))
                 for inner in (value.values() if isinstance(value, dict) else value)]
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep(source)


def _too_large(source: str, most: int) -> UsageError:
    return UsageError(f"{source} has more than {most >> 10} KiB, the most that is read: is it the right file?")


def _too_deep(source: str) -> UsageError:
    return UsageError(f"{source} nests lists or objects more than {MAX_DEPTH} deep: is it the right file?")


PIECE = 4 << 20  # bytes read at a time

Progress = Callable[[int], None]  # called with the bytes done since the last call


class UncachedFile:
    """An open file, closed with the last reference to it.

    size  bytes, when it was opened
    """

    def __init__(self, path: Path, hashed: bool = False) -> None:
        """Open a file; FlowspecError if there is none; ``hashed``: compute the sha256 from what is read."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FlowspecError(f"cannot read {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size
        self._sha = hashlib.sha256() if hashed else None
        self._hashed = 0  # bytes from the beginning

    def fileno(self) -> int:
        return self._file

    def read_into(self, data: memoryview, at: int) -> None:
        """Fill ``data``, of bytes, from byte ``at`` on.

        Files are read once if that is done in their order. FlowspecError if the file ends before, or cannot be
        read.
        """
        if self._sha is not None and at > self._hashed:
            self._hash(at)
        while data:
            count = self._read(data[:PIECE], at)
            data, at = data[count:], at + count

    def sha256(self, progress: Progress | None = None) -> str:
        """Return the sha256 of the whole file in hexadecimal, after reading what has not been read.

        Raise ValueError unless the file was opened with ``hashed``.
        """
        if self._sha is None:
            raise ValueError(f"{self.path} was not opened to be hashed")
        self._hash(self.size, progress)
        self.drop()  # what was read ahead, too
        return self._sha.hexdigest()

    def drop(self) -> None:
        """Drop the whole file from the page cache, except what is mapped."""
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _hash(self, end: int, progress: Progress | None = None) -> None:
        block = memoryview(bytearray(max(0, min(PIECE, end - self._hashed))))
        while self._hashed < end:
            count = self._read(block[: end - self._hashed], self._hashed)
            if progress is not None:
                progress(count)

    def _read(self, data: memoryview, at: int) -> int:
        try:
            count = os.preadv(self._file, [data], at)
        except OSError as error:
            raise FlowspecError(f"cannot read {self.path}: {error.strerror}") from error
        if not count:
            raise FlowspecError(f"{self.path} was cut short while it was read: copy the model again")
        if self._sha is not None and at <= self._hashed < at + count:
            self._sha.update(data[self._hashed - at : count])
            self._hashed = at + count
        # From the beginning: pages and large folios that straddle two pieces are dropped with the second.
        os.posix_fadvise(self._file, 0, at + count, os.POSIX_FADV_DONTNEED)
        return count


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """Hexadecimal; FlowspecError if the file cannot be read."""
    return UncachedFile(path, hashed=True).sha256(progress)
