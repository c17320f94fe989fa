"""What an unfinished sharding has done already: a journal in the output directory.

One line a finished file, written when the file is whole, synced and under its name; the first line says
what was asked for.  A last line that a power cut has torn does not count.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType

from flowspec_edge.errors import UsageError
from flowspec_edge.manifest import PartFile
from flowspec_edge.sharding.files import partial_of, sync_directory, writing

NAME = "sharding.journal"


class Journal:
    """The journal of ``directory``, which is made where it is not there.  Use it in a ``with`` block.

    UsageError when the directory holds something else, an unfinished sharding of another request, or one
    that another process is writing.
    """

    def __init__(self, directory: Path, request: str) -> None:
        self._path = directory / NAME
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            foreign = sorted(path.name for path in directory.iterdir())
        if foreign and NAME not in foreign:
            raise UsageError(f"{directory} is not empty (there is {foreign[0]}), and no unfinished sharding: "
                             "give another --out")
        with writing(self._path):
            self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(f"another process is writing {directory}: wait for it") from None
        try:
            self.done = self._read(request)
        except BaseException:
            self._file.close()
            raise

    def add(self, file: PartFile) -> None:
        """Note a file that is whole."""
        self._append(file.model_dump())
        self.done[file.path] = file

    def remove(self) -> None:
        """The work is done, and the manifest says all that the journal does."""
        with writing(self._path):
            self._path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._file.close()

    def _read(self, request: str) -> dict[str, PartFile]:
        """Finished files by path; those that are not there any more do not count."""
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        torn = len(lines.pop())
        if torn:
            with writing(self._path):
                self._file.truncate(self._file.tell() - torn)
        if not lines:
            self._append({"request": request})
            with writing(self._path):
                sync_directory(self._path.parent)
            return {}
        if json.loads(lines[0]).get("request") != request:
            raise UsageError(f"{self._path.parent} holds an unfinished sharding of another model or with "
                             "other options: run that command again, or give another --out")
        files = [PartFile.model_validate_json(line) for line in lines[1:]]
        return {file.path: file for file in files if self._is_there(file)}

    def _is_there(self, file: PartFile) -> bool:
        path = self._path.parent / file.path
        return path.is_file() and path.stat().st_size == file.size and not partial_of(path).exists()

    def _append(self, entry: dict[str, object]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
