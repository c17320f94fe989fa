"""The board's end of a transfer, as root: a line of JSON per request on stdin, and per answer on stdout.

open    {root, name, files} -> the bytes present of each incomplete file, and the free disk space
put     {path, offset}, followed by the rest of the file's bytes -> whether it is complete
finish  {manifest} -> {}, once all files are complete

A failure is answered with {"error": …} and ends the process, as the end of stdin does.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from flowspec_edge.boards.transfer.store import BLOCK, File, Incoming, Lock, Store
from flowspec_edge.errors import FlowspecError

_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ; 64 KiB costs 16 times as many switches to sshd


class Receiver:
    """One transfer; each request is a method, which returns the answer."""

    def __init__(self, source: BufferedReader) -> None:
        self._source = source
        self._files: dict[str, File] = {}

    def open(self, root: str, name: str, files: list[list[Any]]) -> dict[str, Any]:
        self._lock = Lock(Path(root))
        self._store = Store(Path(root), name)
        self._files = {path: File(path, size, sha256) for path, size, sha256 in files}
        return {"missing": self._store.missing(self._files.values()), "free": self._store.free()}

    def put(self, path: str, offset: int) -> dict[str, Any]:
        file = self._files[path]
        block = memoryview(bytearray(BLOCK))
        try:
            with Incoming(self._store, file, offset) as incoming:
                while remaining := file.size - incoming.size:
                    count = self._source.readinto1(block[:min(remaining, BLOCK)])
                    if not count:
                        raise FlowspecError(f"{path}: the connection to the control host is lost")
                    incoming.write(block[:count])
                return {"complete": incoming.complete()}
        except OSError as error:
            raise FlowspecError(f"cannot write {self._store.home / path}: {error.strerror}") from error

    def finish(self, manifest: str) -> dict[str, Any]:
        self._store.finish(manifest, self._files.values())
        return {}


def _yield_to_newer(number: int, frame: object) -> NoReturn:
    # The other transfer repeats the signal, which would end this process before its exit code is told.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("another transfer to this board has begun")


def main() -> None:
    os.umask(0o022)  # root's may differ: the services' user has to read the files
    signal.signal(signal.SIGTERM, _yield_to_newer)
    with suppress(OSError):  # not a pipe
        fcntl.fcntl(0, _SET_PIPE_SIZE, BLOCK)
    source: Any = sys.stdin.buffer
    receiver = Receiver(source)
    try:
        for line in iter(source.readline, b""):
            request = json.loads(line)
            print(json.dumps(getattr(receiver, request.pop("do"))(**request)), flush=True)
    except FlowspecError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(json.dumps({"error": reason}), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
