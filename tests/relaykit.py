"""A TCP link that can be cut and mended: it forwards bytes to a port of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Relay:
    """Listens on a port of its own (``port``) and forwards to ``target``, both ways."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = 0
        self.mend()

    def mend(self) -> None:
        """Take connections (again)."""
        server = socket.create_server(("127.0.0.1", self.port))
        self.port = server.getsockname()[1]
        with self._lock:
            self._sockets = [server]
        self._run(self._accept, server)

    def cut(self) -> None:
        """Break what there is, as if the cable's ends had noticed, and take nothing more."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            with suppress(OSError):  # the other end may have closed it
                one.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
            one.close()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # the link was cut
            while True:
                near = server.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except ConnectionRefusedError:  # nobody listens there yet; who connects will try again
                    near.close()
                    continue
                with self._lock:
                    if server not in self._sockets:
                        near.close()
                        far.close()
                        return
                    self._sockets += [near, far]
                self._run(self._forward, near, far)
                self._run(self._forward, far, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _run(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
