"""The server process: its socket, its two threads, its shutdown.

The main thread owns the cluster, so that a signal can interrupt it at any time; HTTP has a second thread.
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.runtime.request import SharedCluster
from flowspec_edge.serving.access_log import LogFormatter
from flowspec_edge.serving.admission import AdmissionQueue

log = logging.getLogger(__name__)

_BACKLOG = 128
_GRACE_S = 2  # for connections to take their last bytes


class _Ended(BaseException):
    """SIGINT or SIGTERM; a BaseException, so that no handler takes it for a failure."""


def listen(host: str, port: int, api_key: str | None) -> socket.socket:
    """Return a listening socket; port 0: any free port. UsageError if the host is not this machine's, or is
    reachable from others without an API key; FlowspecError if the port is in use."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"no address for --host {host!r}: {error}") from error
    family, _, _, _, address = found[0]
    if api_key is None and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
        raise UsageError(f"others can reach {host}: set FLOWSPEC_API_KEY (or --api-key), or listen on "
                         "127.0.0.1")
    try:
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]
        raise FlowspecError(f"cannot listen on {host}, port {port}: {reason}; choose with --host and "
                            "--port") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_to_stderr(as_json: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(as_json))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("flowspec_edge.serving").setLevel(logging.INFO)


def serve_app(listener: socket.socket, app: ASGIApp, admission: AdmissionQueue,
              opened: AbstractContextManager[SharedCluster], ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, in the main thread; ``ready`` is called after the first token. Raises
    any error before that, and FlowspecError if HTTP ends by itself."""
    try:
        with _signals_end(), listening(listener, app, admission), opened as cluster:
            admission.run(cluster, ready)
    except _Ended:
        return
    raise FlowspecError("the HTTP server has ended by itself; see the line before")


@contextmanager
def _signals_end() -> Iterator[None]:
    """The first signal raises _Ended in the main thread; further ones are ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise _Ended

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def listening(listener: socket.socket, app: ASGIApp, admission: AdmissionQueue) -> Iterator[None]:
    """Serve HTTP in a thread; at the end open requests get an error, then the socket closes. If HTTP ends
    by itself, the admission queue is closed."""
    config = uvicorn.Config(app, log_config=None, log_level="error", access_log=False, lifespan="off",
                            loop="asyncio", http="h11", ws="none", timeout_graceful_shutdown=_GRACE_S,
                            server_header=False)
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
        thread.join()
        listener.close()
