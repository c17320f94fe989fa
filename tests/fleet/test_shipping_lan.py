"""One file to one neighbour, over real sockets: whoever has no key for it gets nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet import shipping_lan
from flowspec_edge.fleet.shipping_lan import fetch, serve
from flowspec_edge.transport import keys
from flowspec_edge.transport.keys import KeyPair


class Served:
    """A thread that serves ``path``."""

    def __init__(self, path: Path, offset: int, own: KeyPair, neighbour: bytes) -> None:
        self.address, self.error = f"ipc://{path}.socket", ""
        listens = threading.Event()

        def run() -> None:
            try:
                serve(path, offset, self.address, own, neighbour, listens.set)
            except FlowspecError as error:
                self.error = str(error)
            listens.set()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert listens.wait(30)


def test_only_the_one_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    content = bytes(range(256)) * 8000
    path.write_bytes(content)
    own, friend, stranger = (keys.generate() for _ in range(3))
    served = Served(path, 1000, own, friend.public)
    monkeypatch.setattr(shipping_lan, "_SILENCE_MS", 300)
    size = len(content) - 1000
    with pytest.raises(FlowspecError, match="nothing has come from ipc"):
        list(fetch(served.address, stranger, own.public, size))
    with pytest.raises(FlowspecError, match="nothing has come from ipc"):
        list(fetch(served.address, friend, stranger.public, size))  # another server than it was told
    with zmq.Context() as context, context.socket(zmq.PULL) as plain:
        plain.rcvtimeo, plain.linger = 300, 0
        plain.connect(served.address)
        with pytest.raises(zmq.Again):
            plain.recv()
    monkeypatch.undo()
    assert b"".join(fetch(served.address, friend, own.public, size)) == content[1000:]
    served.thread.join(30)
    assert not served.thread.is_alive()
    assert served.error == ""


def test_a_server_waits_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping_lan, "_SILENCE_MS", 100)
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    own, friend = keys.generate(), keys.generate()
    served = Served(path, 0, own, friend.public)
    served.thread.join(30)
    assert served.error == f"nobody has fetched {path} for 0 s"
    path.write_bytes(b"")
    served = Served(path, 0, own, friend.public)  # nothing to give is given at once
    served.thread.join(30)
    assert served.error == ""
