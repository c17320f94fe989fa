"""A board's end of a transfer: does what the control host asks for, in a conversation over ssh.

Knows the questions, one line of JSON each on standard input, and gives one such line as answer to each.
Does not know which files a board is to have, nor what they are.  Runs on the board, as root:

    python -m flowspec_edge.fleet.shipping_board

open    what is missing here of a model's files
put     the rest of a file follows
finish  all is whole
prune   remove what nobody needs

It ends when standard input does.  What it cannot do it says as {"error": …}, and ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.shipping_store import BLOCK, File, Lock, Store, prune

_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ: with 64 KiB sshd and this process take turns 16 times as often

Words = dict[str, Any]


class Conversation:
    """With one control host; ``answer`` takes what to say."""

    def __init__(self, source: BufferedReader, answer: Callable[[Words], None]) -> None:
        self._source, self._answer = source, answer
        self._store: Store | None = None
        self._files: dict[str, File] = {}

    def run(self) -> None:
        """To the end of the input; FlowspecError or OSError for what cannot be done."""
        does: dict[str, Callable[..., None]] = {"open": self._open, "put": self._put, "finish": self._finish,
                                                "prune": self._prune}
        for line in iter(self._source.readline, b""):
            words = json.loads(line)
            does[words.pop("do")](**words)

    def _open(self, root: str, name: str, files: list[list[Any]], verify: bool) -> None:
        self._lock = Lock(Path(root))
        self._store = Store(Path(root), name)
        self._files = {path: File(path, size, sha256) for path, size, sha256 in files}
        missing, linked = self._store.missing(self._files.values(), verify)
        self._answer({"missing": {each.file.path: each.offset for each in missing}, "linked": linked,
                      "free": self._store.free()})

    def _put(self, path: str, offset: int) -> None:
        assert self._store is not None
        file = self._files[path]
        block = memoryview(bytearray(BLOCK))
        try:
            with self._store.incoming(file, offset) as incoming:
                while left := file.size - incoming.size:
                    count = self._source.readinto1(block[:min(left, BLOCK)])
                    if not count:
                        raise FlowspecError(f"{path}: the control host has gone")
                    incoming.write(block[:count])
                self._answer({"whole": incoming.whole()})
        except OSError as error:
            raise FlowspecError(f"cannot write {self._store.home / path}: {error.strerror}") from error

    def _finish(self, manifest: str) -> None:
        assert self._store is not None
        self._answer({"changed": self._store.finish(manifest, self._files.values())})

    def _prune(self, root: str, keep: list[str]) -> None:
        self._lock = Lock(Path(root))
        self._answer({"removed": prune(Path(root), keep)})


def main() -> None:
    """Exits with 1 after an error, which has been answered."""
    def answer(words: Words) -> None:
        print(json.dumps(words), flush=True)

    os.umask(0o022)  # whoever runs this: the service's user has to read what root writes
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("another transfer to this board has begun"))
    with suppress(OSError):  # no pipe
        fcntl.fcntl(0, _SET_PIPE_SIZE, BLOCK)
    try:
        Conversation(sys.stdin.buffer, answer).run()  # type: ignore[arg-type]
    except FlowspecError as error:
        answer({"error": str(error)})
        sys.exit(1)
    except OSError as error:
        answer({"error": f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)})
        sys.exit(1)


if __name__ == "__main__":
    main()
