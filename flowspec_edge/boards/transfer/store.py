"""A sharded model's files on a board's disk.

    MODEL/manifest.json            written last
    MODEL/PART/…                   complete files, renamed into place after verification
    MODEL/.partial/SHA256          the beginning of a file
    MODEL/.verified.json           path → size, mtime (ns), sha256: files with this size and mtime are not
                                   read again

``lacking`` also runs on boards without a release: standard library only, Python 3.8.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flowspec_edge.util.files import PARTIAL, publish, write_atomically

MANIFEST = "manifest.json"
BLOCK = 1 << 20
_PARTIAL, _VERIFIED, _LOCK = ".partial", ".verified.json", ".lock"
_TAKE_OVER_S = 10.0  # for the other transfer to end


class File(NamedTuple):
    """A file of a model; ``path`` is relative to the model's directory, ``sha256`` in hexadecimal."""

    path: str
    size: int
    sha256: str


class Store:
    """The model ``name`` below ``root``; directories are created on demand."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.home = root, root / name
        self._verified = _read_verified(self.home)

    def missing(self, files: Iterable[File]) -> dict[str, int]:
        """Return the incomplete ones of ``files``: path → bytes present.

        Files that changed since verification are read.  Identical files of other models become hard links.
        """
        incomplete = [file for file in files if not self._complete(file) and not self._link(file)]
        keep = {file.sha256 for file in incomplete}
        with suppress(FileNotFoundError):
            for partial in (self.home / _PARTIAL).iterdir():
                if partial.name not in keep:
                    partial.unlink()
        return {file.path: self.offset(file) for file in incomplete}

    def is_verified(self, file: File) -> bool:
        """Return whether the file exists and has not changed since verification."""
        path = self.home / file.path
        return (path.is_file() and not path.is_symlink() and path.stat().st_size == file.size
                and self._verified.get(file.path) == _mark(path, file.sha256))

    def offset(self, file: File) -> int:
        """Return the bytes present of an incomplete file; 0 for a partial file that is too long."""
        try:
            size = self.partial(file).stat().st_size
        except OSError:
            return 0
        return size if size <= file.size else 0

    def partial(self, file: File) -> Path:
        return self.home / _PARTIAL / file.sha256

    def take(self, file: File) -> None:
        """Move a verified partial file into place."""
        target = self.home / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        publish(self.partial(file), target)
        self._remember(file)

    def strays(self, files: Collection[File]) -> Iterator[Path]:
        """Yield the unknown files in the directories of the parts of ``files``."""
        paths = {self.home / file.path for file in files}
        for part in sorted({file.path.split("/")[0] for file in files}):
            yield from (path for path in (self.home / part).rglob("*")
                        if not path.is_dir() and path not in paths)

    def finish(self, manifest: str, files: Collection[File]) -> None:
        """Remove all files but ``files`` from their parts, and write the manifest; ``files`` must be complete."""
        for path in [*self.strays(files), *self.home.glob(f".*{PARTIAL}")]:  # an interrupted write's, too
            path.unlink()
        with suppress(FileNotFoundError):
            shutil.rmtree(self.home / _PARTIAL)
        _write(self.home / MANIFEST, manifest)

    def free(self) -> int:
        """Return the bytes that an ordinary user may still write below ``root``."""
        ancestor = self.root
        while not ancestor.is_dir():
            ancestor = ancestor.parent
        return shutil.disk_usage(ancestor).free

    def _complete(self, file: File) -> bool:
        if self.is_verified(file):
            return True
        path = self.home / file.path
        if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
            return False
        if sha256_of(path) != file.sha256:
            return False
        self._remember(file)
        return True

    def _link(self, file: File) -> bool:
        other = find(self.root, file.sha256)
        if other is None or other == self.home / file.path:
            return False
        self.partial(file).parent.mkdir(parents=True, exist_ok=True)
        self.partial(file).unlink(missing_ok=True)
        try:
            os.link(other, self.partial(file))
        except OSError:  # not supported by every file system
            return False
        self.take(file)
        return True

    def _remember(self, file: File) -> None:
        self._verified[file.path] = _mark(self.home / file.path, file.sha256)
        _write(self.home / _VERIFIED, json.dumps(self._verified, indent=1))


class Incoming:
    """A file being received; an incomplete one stays on disk."""

    def __init__(self, store: Store, file: File, offset: int) -> None:
        self._store, self._file = store, file
        self._path = path = store.partial(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sha = hashlib.sha256()
        if not offset:
            path.unlink(missing_ok=True)  # may be a hard link to another model's file
        self._stream = path.open("r+b" if offset else "xb", buffering=0)
        block = memoryview(bytearray(BLOCK))
        remaining = offset
        while remaining and (count := self._stream.readinto(block[:min(remaining, BLOCK)])):
            self._sha.update(block[:count])
            remaining -= count
        self._stream.truncate(offset - remaining)
        self.size = offset - remaining

    def write(self, data: memoryview) -> None:
        self._sha.update(data)
        self.size += len(data)
        while len(data):
            data = data[self._stream.write(data):]

    def complete(self) -> bool:
        """Move the file into place if its size and sha256 are right, else remove it.

        Return whether they are right.
        """
        if self.size != self._file.size or self._sha.hexdigest() != self._file.sha256:
            self._path.unlink()
            return False
        os.fsync(self._stream.fileno())  # before the rename, against power failures
        self._store.take(self._file)
        return True

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()


class Lock:
    """A lock for one transfer at a time below ``root``.

    A new transfer ends an older one, whose control host may be gone.
    """

    def __init__(self, root: Path) -> None:
        """Take the lock; raise TimeoutError if the other transfer does not end."""
        root.mkdir(parents=True, exist_ok=True)
        self._file = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + _TAKE_OVER_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                other = os.pread(self._file, 20, 0).strip()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another transfer (process {other.decode()}) does not end: kill it "
                                       "there") from None
                if other.isdigit():
                    late = time.monotonic() > deadline - _TAKE_OVER_S / 2  # it may be stopped
                    with suppress(ProcessLookupError):
                        os.kill(int(other), signal.SIGKILL if late else signal.SIGTERM)
                # Polled, because flock has no timeout.
                time.sleep(0.05)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, b"%d\n" % os.getpid(), 0)


def lacking(root: Path, name: str, files: Collection[File], manifest_sha256: str) -> tuple[int, bool]:
    """Return the bytes to send, unverified files included, and whether a transfer would change anything."""
    store, count = Store(root, name), 0
    manifest = store.home / MANIFEST
    new = not manifest.is_file() or sha256_of(manifest) != manifest_sha256 or any(store.strays(files))
    for file in files:
        if not store.is_verified(file):
            new = True
            count += 0 if find(root, file.sha256) else file.size - store.offset(file)
    return count, new


def parts_in(root: Path) -> list[str]:
    """Return "MODEL/PART" of each part below ``root``; "MODEL" for a model without parts."""
    parts = []
    for home in _directories(root):
        parts += [f"{home.name}/{part.name}" for part in _directories(home)] or [home.name]
    return parts


def find(root: Path, sha256: str) -> Path | None:
    """Find a verified file with this sha256 in any model below ``root``."""
    for home in _directories(root):
        for name, mark in _read_verified(home).items():
            if mark[-1] == sha256 and (home / name).is_file() and mark == _mark(home / name, sha256):
                return home / name
    return None


def sha256_of(path: Path) -> str:
    sha, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            sha.update(block[:count])
    return sha.hexdigest()


def _directories(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(entry for entry in path.iterdir()
                  if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."))


def _mark(path: Path, sha256: str) -> list[int | str]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, sha256]


def _read_verified(home: Path) -> dict[str, list[int | str]]:
    try:
        marks = json.loads((home / _VERIFIED).read_bytes())
    except (OSError, ValueError):
        return {}  # then files are verified again
    return {name: mark for name, mark in marks.items() if isinstance(mark, list) and mark} \
        if isinstance(marks, dict) else {}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
