"""The server process: its socket, its two threads, its shutdown.

The main thread owns the cluster and gets the signals; HTTP has a second thread.

Limits for HTTP connections that uvicorn does not have: their number, and how long a client may take to send
its request or to read the answer.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import re
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowspec_edge.d0.request_queue import SharedCluster
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.serving.access_log import LimitedHandler, LogFormatter
from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.util.urls import http_url

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_CONNECTIONS = 512
_MAX_DESCRIPTORS = 65536  # some systems allow a million, and libraries scan as many as are allowed
_CHECK_S = 1.0
_ENDED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)  # states of a client that has sent its request


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits that keep one client from using the server up.

    connections  limit of open connections. A new one above the limit replaces the connection that has
                 waited longest for its client's request; if none waits, the new one is refused with 503
    head_s       seconds for a request's first line and headers, from the connection or the previous answer
    body_s       seconds for a request's body
    read_s       seconds for which a client that does not read may leave an answer waiting in the server
    """

    connections: int = _MAX_CONNECTIONS
    head_s: float = 10.0
    body_s: float = 60.0
    read_s: float = 60.0


def usual_limits() -> ConnectionLimits:
    """Raise this process' limit of open files as far as allowed.

    Return limits that leave half of the files to the cluster.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return ConnectionLimits(min(_MAX_CONNECTIONS, most // 2))


class LimitedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._waits_for: str | None = None  # what the client has to do: send a head, a body, or read
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        full = len(self.connections) >= self._limits.connections
        super().connection_made(transport)
        if self.client:
            self.client = _plain_address(self.client[0]), self.client[1]
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
        """End the connection with the server: at once if it waits for its client."""
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


def _plain_address(host: str) -> str:
    """Return an IPv4 client's own address, where a socket of IPv6 serves both."""
    return host.removeprefix("::ffff:") if "." in host else host


log = logging.getLogger(__name__)

_BRACKETS = re.compile(r"\[(.*)\]")
_BACKLOG = 128
_GRACE_S = 2  # for connections to send their last bytes
_END_S = 30.0  # for the HTTP thread to end
_SEND_BUFFER = 256 * 2**10  # bytes of an answer that a connection holds for a client that does not read
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Ended(BaseException):
    """A signal during the start; a BaseException, so that no handler takes it for a failure."""


def listen(host: str, port: int, api_key: str | None) -> socket.socket:
    """Return a listening socket; port 0: any free port.

    UsageError if the host is not this machine's, or is reachable from others without an API key; FlowspecError if
    the port is in use.
    """
    try:
        addresses = socket.getaddrinfo(_BRACKETS.sub(r"\1", host), port, type=socket.SOCK_STREAM,
                                       flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"no address for --host {host!r}: {error}") from error
    family, _, _, _, address = addresses[0]
    binds_all = str(address[0]) == "::"  # with the addresses of IPv4, as other servers do
    if api_key is None and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
        raise UsageError(f"others can reach {host}: set FLOWSPEC_API_KEY (or --api-key), or listen on "
                         "127.0.0.1")
    try:
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG,
                                        dualstack_ipv6=binds_all and socket.has_dualstack_ipv6())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it
        return listener
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]
        raise FlowspecError(f"cannot listen on {host}, port {port}: {reason}; choose with --host and "
                            "--port") from error


def url_of(listener: socket.socket) -> str:
    """Where this machine's clients find it."""
    host, port = listener.getsockname()[:2]
    return http_url(host, port)


def log_to_stderr(as_json: bool) -> None:
    handler = LimitedHandler()
    handler.setFormatter(LogFormatter(as_json))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("flowspec_edge.serving").setLevel(logging.INFO)


def serve_app(listener: socket.socket, app: ASGIApp, admission: Admission,
              opened: AbstractContextManager[SharedCluster], ready: Callable[[], None],
              trusted_proxies: str = "") -> None:
    """Serve until SIGINT or SIGTERM, in the main thread; ``ready`` is called after the first token.

    ``trusted_proxies``: as in :func:`listening`. Raises any error before that, and FlowspecError if HTTP ends by
    itself.
    """
    with _EndSignals(admission) as signals:
        try:
            with (suppress(_Ended), listening(listener, app, admission, trusted_proxies=trusted_proxies),
                  ExitStack() as stack):
                with signals.interrupt():  # imports torch
                    cluster = stack.enter_context(opened)
                # A collection delays every client. Frozen, the libraries' many objects are not looked at.
                gc.collect()
                gc.freeze()
                admission.run(cluster, ready, signals.interrupt)
        except FlowspecError:
            if not signals.received:  # else the error may come from stages that got the same signal
                raise
    if not signals.received:
        raise FlowspecError("the HTTP server has ended by itself; see the line before")


class _EndSignals:
    """SIGINT and SIGTERM end :meth:`Admission.run`; further ones are ignored."""

    def __init__(self, admission: Admission) -> None:
        self.received = False
        self._admission = admission
        self._interrupts = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._receive) for number in _END_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupt(self) -> Iterator[None]:
        """Let a signal raise _Ended at any bytecode of this context.

        Only for the start of a cluster, which may read a model for minutes without checking for the end. Nothing
        can be lost then, and processes that were started end with this one.
        """
        try:
            self._interrupts = True
            if self.received:
                raise _Ended
            yield
        finally:
            self._interrupts = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            return
        self.received = True
        self._admission.end()
        if self._interrupts:
            raise _Ended


@contextmanager
def listening(listener: socket.socket, app: ASGIApp, admission: Admission,
              limits: ConnectionLimits | None = None, trusted_proxies: str = "") -> Iterator[None]:
    """Serve HTTP in a thread; at the end open requests get an error, then the socket closes.

    If HTTP ends by itself, the admission queue is closed.

    limits           instead of the usual ones
    trusted_proxies  addresses and networks, separated by commas, whose X-Forwarded-For names the client
    """
    protocol: Any = partial(LimitedProtocol, limits=limits or usual_limits())
    config = uvicorn.Config(app, log_config=None, log_level="error", access_log=False, lifespan="off",
                            loop="asyncio", http=protocol, ws="none", timeout_graceful_shutdown=_GRACE_S,
                            server_header=False, backlog=_BACKLOG, proxy_headers=bool(trusted_proxies),
                            forwarded_allow_ips=trusted_proxies)
    server = uvicorn.Server(config)

    def http() -> None:
        try:
            server.run(sockets=[listener])
        except Exception as error:
            log.error("HTTP: %s: %s", type(error).__name__, error)
        finally:
            admission.close()

    thread = threading.Thread(target=http, name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        admission.close()
        server.should_exit = True
        thread.join(_END_S)
        if thread.is_alive():
            log.warning("HTTP did not end within %g s; its connections break", _END_S)
        listener.close()
