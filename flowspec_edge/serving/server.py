"""The server as a process: its socket, its two threads, its end.

Knows that the main thread owns the cluster, so that a signal ends whatever it does, starting and
prefilling included, and that HTTP runs beside it.  Does not know what is served.
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
from flowspec_edge.serving.desk import Desk
from flowspec_edge.serving.log import Lines

log = logging.getLogger(__name__)

_BACKLOG = 128
_GRACE_S = 2  # for connections to take their last bytes


class _Ended(BaseException):
    """SIGINT or SIGTERM; not an Exception, so that nothing on the way takes it for a failure."""


def listen(host: str, port: int, api_key: str | None) -> socket.socket:
    """A listening socket; port 0 is any.

    UsageError for a host that is not this machine's, and for one that others can reach while there is
    no key; FlowspecError for a port in use.
    """
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
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_to_stderr(as_json: bool) -> None:
    """A line for every request, and for what happens to the cluster."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines(as_json))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("flowspec_edge.serving").setLevel(logging.INFO)


def serve_app(listener: socket.socket, app: ASGIApp, desk: Desk,
              opened: AbstractContextManager[SharedCluster], ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; to be called in the main thread.

    Raises what keeps the cluster from its first token, and FlowspecError if HTTP ends by itself;
    ``ready`` is called when the first token has come.
    """
    try:
        with _signals_end(), listening(listener, app, desk), opened as cluster:
            desk.run(cluster, ready)
    except _Ended:
        return
    raise FlowspecError("the HTTP server has ended by itself; see the line before")


@contextmanager
def _signals_end() -> Iterator[None]:
    """The first signal raises _Ended here; further ones cannot disturb what that sets off."""
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
def listening(listener: socket.socket, app: ASGIApp, desk: Desk) -> Iterator[None]:
    """HTTP in a thread of its own; at the end open requests get an error, then the socket closes.

    Should HTTP end before that, the desk is closed: nobody could come any more.
    """
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
            desk.close()

    thread = threading.Thread(target=http, name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        desk.close()
        server.should_exit = True
        thread.join()
        listener.close()
