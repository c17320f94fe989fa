"""A board's end of a transfer: does what the control host asks for, in a conversation over ssh.

Knows the questions, one line of JSON each on standard input, and gives one such line as answer to each.
Does not know which files a board is to have, nor what they are.  Runs on the board, as root:

    python -m flowspec_edge.fleet.shipping_board

open    what is missing here of a model's files, and which of other files are here
put     the rest of a file follows
key     this process' public key, made for one transfer
fetch   get the rest of a file from a neighbour; says meanwhile how much has come
serve   give the rest of a file to the neighbour who has a key
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
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.shipping_store import BLOCK, File, Incoming, Lock, Store, find, prune

if TYPE_CHECKING:
    from flowspec_edge.transport.keys import KeyPair

_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ: with 64 KiB sshd and this process take turns 16 times as often
_TELL_S = 0.2  # between words of how much has come

Words = dict[str, Any]


class Conversation:
    """With one control host; ``answer`` takes what to say."""

    def __init__(self, source: BufferedReader, answer: Callable[[Words], None]) -> None:
        self._source, self._answer = source, answer
        self._store: Store | None = None
        self._files: dict[str, File] = {}
        self._keys: KeyPair | None = None

    def run(self) -> None:
        """To the end of the input; FlowspecError or OSError for what cannot be done."""
        does: dict[str, Callable[..., None]] = {"open": self._open, "put": self._put, "key": self._key,
                                                "fetch": self._fetch, "serve": self._serve,
                                                "finish": self._finish, "prune": self._prune}
        for line in iter(self._source.readline, b""):
            words = json.loads(line)
            does[words.pop("do")](**words)

    def _open(self, root: str, name: str, files: list[list[Any]], verify: bool, wanted: list[str]
              ) -> None:
        self._lock = Lock(Path(root))
        self._store = Store(Path(root), name)
        self._files = {path: File(path, size, sha256) for path, size, sha256 in files}
        missing, linked = self._store.missing(self._files.values(), verify)
        self._answer({"missing": {each.file.path: each.offset for each in missing}, "linked": linked,
                      "free": self._store.free(),
                      "held": [sha256 for sha256 in wanted if find(Path(root), sha256)]})

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

    # Encryption is imported where it is wanted: it takes a board longer than to see that all is there.

    def _key(self) -> None:
        from flowspec_edge.transport import keys

        self._keys = keys.generate()
        self._answer({"key": self._keys.public.decode()})

    def _fetch(self, path: str, offset: int, address: str, key: str) -> None:
        from flowspec_edge.fleet.shipping_lan import fetch

        assert self._store is not None
        assert self._keys is not None
        file = self._files[path]
        try:
            with self._store.incoming(file, offset) as incoming:
                try:
                    self._take(incoming, fetch(address, self._keys, key.encode(), file.size - incoming.size))
                except FlowspecError as error:
                    self._answer({"whole": False, "size": incoming.size, "why": str(error)})
                else:
                    self._answer({"whole": incoming.whole(), "size": 0, "why": "it is not what it should be"})
        except OSError as error:
            raise FlowspecError(f"cannot write {self._store.home / path}: {error.strerror}") from error

    def _take(self, incoming: Incoming, pieces: Iterator[bytes]) -> None:
        told = time.monotonic()
        for piece in pieces:
            incoming.write(piece)
            if time.monotonic() > told + _TELL_S:
                told = time.monotonic()
                self._answer({"size": incoming.size})

    def _serve(self, root: str, sha256: str, offset: int, address: str, key: str) -> None:
        from flowspec_edge.fleet.shipping_lan import serve
        from flowspec_edge.transport import keys

        path = find(Path(root), sha256)
        if path is None:
            raise FlowspecError("it is not there any more")
        own = keys.generate()
        serve(path, offset, address, own, key.encode(), lambda: self._answer({"key": own.public.decode()}))

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
        answer({"error": f"{error.filename}: {error.strerror}" if error.filename else str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
