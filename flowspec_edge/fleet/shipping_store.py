"""Sharded models on a board's disk: what is whole, what is half there, and how the rest gets in.

Knows the directory of models, sizes and sha256.  Does not know manifests, nor where bytes come from.
Runs on the board, for :func:`lacking` before anything of ours is there: the standard library alone.

    MODEL/manifest.json            written last
    MODEL/PART/…                   whole files, renamed into place once their sha256 was right
    MODEL/.partial/SHA256          what has come of a file so far
    MODEL/.verified.json           path → size, time of change (ns) and sha256 of each whole file, as they
                                   were when it was read: it need not be read again while they are the same
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

MANIFEST = "manifest.json"
BLOCK = 1 << 20
_PARTIAL, _VERIFIED, _LOCK = ".partial", ".verified.json", ".lock"
_TAKE_OVER_S = 10.0  # for another transfer to end


@dataclass(frozen=True)
class File:
    """A file of a model: ``path`` is relative to the model's directory, ``sha256`` in hexadecimal."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Missing:
    """A file that is not whole: its first ``offset`` bytes are there."""

    file: File
    offset: int

    @property
    def bytes(self) -> int:
        """How many are missing."""
        return self.file.size - self.offset


class Store:
    """One model, in the directory ``name`` below ``root``; nothing is made before it is needed."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.home = root, root / name
        self._verified = _read_verified(self.home)

    def missing(self, files: Iterable[File], verify: bool = False) -> tuple[list[Missing], int]:
        """Of ``files`` those that are not whole here; and how many others were taken over from another
        model on this board, as hard links.

        A file that nobody has looked at since it changed is read; with ``verify`` all are.
        """
        wanted, linked, found = list(files), 0, []
        for file in wanted:
            if self._whole(file, verify):
                continue
            if self._link(file):
                linked += 1
            else:
                found.append(Missing(file, self.offset(file)))
        keep = {missing.file.sha256 for missing in found}
        for partial in self._partials():
            if partial.name not in keep:
                partial.unlink()
        return found, linked

    def seen(self, file: File) -> bool:
        """Whether the file is here, and nothing has touched it since it was found right."""
        path = self.home / file.path
        return (path.is_file() and not path.is_symlink() and path.stat().st_size == file.size
                and self._verified.get(file.path) == _seen(path, file.sha256))

    def offset(self, file: File) -> int:
        """How much of a file that is not whole is here; more than the whole is nothing."""
        try:
            size = self._partial(file).stat().st_size
        except OSError:
            return 0
        return size if size <= file.size else 0

    def incoming(self, file: File, offset: int) -> Incoming:
        """Takes ``file`` in from ``offset`` on."""
        return Incoming(self, file, offset)

    def take(self, file: File) -> None:
        """Put a file whose partial has been found right in its place."""
        target = self.home / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._partial(file), target)
        _sync(target.parent)
        self._remember(file)

    def finish(self, manifest: str, files: Collection[File]) -> bool:
        """Once ``files`` are whole: nothing else is left in their parts, and the manifest is there.

        Returns whether that changed anything.
        """
        changed = False
        known = {self.home / file.path for file in files}
        for part in {file.path.split("/")[0] for file in files}:
            for path in (self.home / part).rglob("*"):
                if not path.is_dir() and path not in known:
                    path.unlink()
                    changed = True
        with suppress(FileNotFoundError):
            shutil.rmtree(self.home / _PARTIAL)
        path = self.home / MANIFEST
        if not path.is_file() or path.read_bytes() != manifest.encode():
            _write(path, manifest)
            changed = True
        return changed

    def free(self) -> int:
        """Bytes that are free on the disk where models lie, for whoever is not root."""
        there = self.root
        while not there.is_dir():
            there = there.parent
        return shutil.disk_usage(there).free

    def _partial(self, file: File) -> Path:
        return self.home / _PARTIAL / file.sha256

    def _partials(self) -> list[Path]:
        try:
            return list((self.home / _PARTIAL).iterdir())
        except FileNotFoundError:
            return []

    def _whole(self, file: File, verify: bool) -> bool:
        path = self.home / file.path
        if not verify and self.seen(file):
            return True
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
        self._partial(file).parent.mkdir(parents=True, exist_ok=True)
        self._partial(file).unlink(missing_ok=True)
        try:
            os.link(other, self._partial(file))
        except OSError:  # not every file system can
            return False
        self.take(file)
        return True

    def _remember(self, file: File) -> None:
        self._verified[file.path] = _seen(self.home / file.path, file.sha256)
        _write(self.home / _VERIFIED, json.dumps(self._verified, indent=1))


class Incoming:
    """A file on its way in; a context manager.  What has come stays if it is left half-way."""

    def __init__(self, store: Store, file: File, offset: int) -> None:
        self._store, self._file = store, file
        path = store.home / _PARTIAL / file.sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._sha = hashlib.sha256()
        if not offset:
            path.unlink(missing_ok=True)
        self._stream = path.open("r+b" if offset else "xb", buffering=0)
        block = memoryview(bytearray(BLOCK))
        left = offset
        while left and (count := self._stream.readinto(block[:min(left, BLOCK)])):
            self._sha.update(block[:count])
            left -= count
        self._stream.truncate(offset - left)
        self.size = offset - left

    def write(self, data: memoryview | bytes) -> None:
        """The next bytes."""
        self._sha.update(data)
        view = memoryview(data)
        while len(view):
            view = view[self._stream.write(view):]
        self.size += len(data)

    def whole(self) -> bool:
        """At the end: whether the file is as it must be.  If so it is in its place, else forgotten."""
        if self.size != self._file.size or self._sha.hexdigest() != self._file.sha256:
            self._path.unlink()
            return False
        os.fsync(self._stream.fileno())  # before its name says that it is whole: power may fail
        self._store.take(self._file)
        return True

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stream.close()


class Lock:
    """One transfer at a time below ``root``: the newest, for an older one's control host may be gone."""

    def __init__(self, root: Path) -> None:
        """TimeoutError if another one does not end."""
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
                    with suppress(ProcessLookupError):
                        os.kill(int(other), signal.SIGTERM)
                # Up to the deadline above: flock waits for ever or not at all.
                time.sleep(0.05)  # between two looks: a lock that is let go sends no word
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, b"%d\n" % os.getpid(), 0)


def lacking(root: Path, name: str, files: Iterable[File]) -> tuple[int, bool]:
    """How many bytes of ``files`` would have to come, and whether any file or the manifest would be new; as
    far as can be told by looking."""
    store, count, new = Store(root, name), 0, not (root / name / MANIFEST).is_file()
    for file in files:
        if not store.seen(file):
            new = True
            count += 0 if find(root, file.sha256) else file.size - store.offset(file)
    return count, new


def find(root: Path, sha256: str) -> Path | None:
    """A whole file with this sha256 in any model below ``root``."""
    for home in _directories(root):
        for name, seen in _read_verified(home).items():
            if seen[-1] == sha256 and (home / name).is_file() and seen == _seen(home / name, sha256):
                return home / name
    return None


def prune(root: Path, keep: Collection[str]) -> list[str]:
    """Remove what is not in ``keep``, "MODEL/PART" each; what was removed, in the same words."""
    removed = []
    for home in _directories(root):
        parts = _directories(home)
        gone = [part for part in parts if f"{home.name}/{part.name}" not in keep]
        for path in [home] if len(gone) == len(parts) else gone:
            shutil.rmtree(path)
        removed += [f"{home.name}/{part.name}" for part in gone]
    return removed


def _directories(path: Path) -> list[Path]:
    """Those in ``path`` that are not hidden."""
    if not path.is_dir():
        return []
    return sorted(entry for entry in path.iterdir()
                  if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."))


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    sha, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            sha.update(block[:count])
    return sha.hexdigest()


def _seen(path: Path, sha256: str) -> list[int | str]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, sha256]


def _read_verified(home: Path) -> dict[str, list[int | str]]:
    try:
        found = json.loads((home / _VERIFIED).read_bytes())
    except (OSError, ValueError):
        return {}  # then files are read again
    return {name: seen for name, seen in found.items() if isinstance(seen, list) and seen} \
        if isinstance(found, dict) else {}


def _write(path: Path, text: str) -> None:
    """Atomically, power failures included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file
    os.replace(new, path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
