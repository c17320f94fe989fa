"""Files that are read once, with their sha256 as a by-product, and leave nothing in the page cache.

A board's GPU shares the system's memory, and CUDA on Tegra does not reliably get back what the page cache
holds: the cache would stand beside the weights that were read through it. ``posix_fadvise`` drops no pages of
a mapping, hence pread. Without torch.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from flowspec_edge.errors import FlowspecError

PIECE = 4 << 20  # bytes read at a time

Progress = Callable[[int], None]  # called with the bytes done since the last call


class UncachedFile:
    """An open file, closed with the last reference to it.

    size  bytes, when it was opened
    """

    def __init__(self, path: Path, hashed: bool = False) -> None:
        """``hashed``: compute the sha256 from what is read. FlowspecError if there is no such file."""
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
        """Fill ``data``, of bytes, from byte ``at`` on. Files are read once if that is done in their order.
        FlowspecError if the file ends before, or cannot be read."""
        if self._sha is not None and at > self._hashed:
            self._hash(at)
        while data:
            count = self._read(data[:PIECE], at)
            data, at = data[count:], at + count

    def sha256(self, progress: Progress | None = None) -> str:
        """Hexadecimal, of the whole file: reads what has not been read. ValueError unless ``hashed``."""
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
