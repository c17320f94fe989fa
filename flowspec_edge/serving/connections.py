"""Limits for HTTP connections that uvicorn does not have: their number, and how long a client may take to
send its request or to read the answer."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowspec_edge.serving.openai.errors import ApiError

_MAX_CONNECTIONS = 512
_MAX_DESCRIPTORS = 65536  # some systems allow a million, and libraries scan as many as are allowed
_CHECK_S = 1.0
_ENDED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)  # states of a client that has sent its request


@dataclass(frozen=True)
class ConnectionLimits:
    """connections  of the server. A new one above the limit replaces the one that has waited longest for its
                 client's request; if none waits, it is refused with 503
    head_s       for a request's first line and headers, from the connection or the answer before it
    body_s       for a request's body
    read_s       for which a client that does not read may leave an answer waiting in the server
    """

    connections: int = _MAX_CONNECTIONS
    head_s: float = 10.0
    body_s: float = 60.0
    read_s: float = 60.0


def usual_limits() -> ConnectionLimits:
    """Raise this process' limit of open files as far as it goes; half of them are left to the cluster."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return ConnectionLimits(min(_MAX_CONNECTIONS, most // 2))


class LimitedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._waits_for: str | None = None  # what the client has to do: send a head, a body, or read
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        full = len(self.connections) >= self._limits.connections
        super().connection_made(transport)
        self._look()
        self._timer = self.loop.call_later(_CHECK_S, self._check)
        if full:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: it does not wait for its clients."""
        self._look()
        if self._waits_for:
            self._end()
        else:
            super().shutdown()

    def _make_room(self) -> None:
        """End another connection, or this one."""
        waiting = [other for other in self.connections if isinstance(other, LimitedProtocol)
                   and other is not self and other._waits_for in ("head", "body")]
        if waiting:
            min(waiting, key=lambda other: other._since)._end()
            return
        refusal = ApiError(503, f"{self._limits.connections} connections are open already", code="overloaded",
                           retry_after=1).response()
        head = "".join(f"{name}: {value}\r\n" for name, value in refusal.headers.items())
        self.transport.write(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
                             + head.encode("latin-1") + b"\r\n" + bytes(refusal.body))
        self.transport.close()

    def _end(self) -> None:
        self._waits_for = None
        self.connections.discard(self)  # the socket itself is closed in the loop's next round
        self.transport.abort()

    def _look(self) -> None:
        """Note what the client has to do, and since when."""
        request = self.conn.their_state
        waits_for = None
        if self.transport.get_write_buffer_size():
            waits_for = "reading"
        elif request is h11.IDLE:
            waits_for = "head"
        elif request not in _ENDED:
            waits_for = "body"
        if waits_for != self._waits_for:
            self._waits_for, self._since = waits_for, self.loop.time()

    def _check(self) -> None:
        self._look()
        limits = {"head": self._limits.head_s, "body": self._limits.body_s, "reading": self._limits.read_s}
        if self._waits_for and self.loop.time() - self._since >= limits[self._waits_for]:
            self._end()
        else:
            self._timer = self.loop.call_later(min(_CHECK_S, *limits.values()), self._check)
