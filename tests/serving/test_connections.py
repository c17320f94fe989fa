"""Clients that do not finish their requests, or do not read their answers, take nothing from the others."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from kits.http_server import served
from kits.process_clusters import PATIENCE, until
from starlette.types import ASGIApp, Receive, Scope, Send

from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.app import make_app
from flowspec_edge.serving.server import ConnectionLimits, listen, listening, url_of

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NEVER = 1e6  # seconds


@contextmanager
def limited(model: Path, app: ASGIApp | None = None, **limits: float) -> Iterator[str]:
    """A server whose cluster has not started; limits that are not given are never reached."""
    what = served(model)
    admission, listener = Admission(what.probe()), listen("127.0.0.1", 0, None)
    complete = ConnectionLimits(**{"connections": 4, "head_s": NEVER, "body_s": NEVER, "read_s": NEVER,
                                   **limits})  # type: ignore[arg-type]
    with listening(listener, app or make_app(admission, what), admission, complete):
        yield url_of(listener)


def connect(url: str, data: bytes = b"") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), PATIENCE)
    connection.sendall(data)
    return connection


def closed(connection: socket.socket) -> bool:
    """Read until the server closes it."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


@pytest.mark.parametrize(("limit", "sent"), [
    ("head_s", b""), ("head_s", HEAD), ("body_s", POST + b"Content-Length: 9\r\n\r\n{"),
    ("body_s", POST + b"Transfer-Encoding: chunked\r\n\r\n"),
    ("body_s", HEAD + b"Content-Length: 9\r\n\r\n{")])  # an endpoint that does not ask for the body
def test_what_is_not_sent_in_time_is_given_up(model: Path, limit: str, sent: bytes) -> None:
    with limited(model, **{limit: 0.01}) as url, connect(url, sent) as connection:
        assert closed(connection)


def test_a_head_without_end_is_refused(model: Path) -> None:
    with limited(model) as url, connect(url, HEAD + b"X: " + b"a" * 17 * 2**10) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_a_new_client_replaces_the_longest_idle_one(model: Path) -> None:
    with limited(model) as url, ExitStack() as stack:
        halves = [stack.enter_context(connect(url, HEAD)) for _ in range(4)]
        for half in halves:
            assert httpx2.get(f"{url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
            stack.enter_context(connect(url, HEAD))
            assert closed(half)


def test_above_the_limit_a_client_is_refused(model: Path) -> None:
    inside = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal inside
        inside += 1
        while (await receive())["type"] != "http.disconnect":
            pass

    with (limited(model, app, connections=2) as url, connect(url, HEAD + b"\r\n"),
          connect(url, HEAD + b"\r\n")):
        until(lambda: inside == 2)
        answer = httpx2.get(url, trust_env=False, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert "2 connections are open already" in answer.json()["error"]["message"]


def test_a_client_that_does_not_read_is_disconnected(model: Path) -> None:
    ended: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            for _ in range(1000):
                await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        ended.append(True)

    with limited(model, app, read_s=0.01) as url, connect(url, HEAD + b"\r\n"):
        until(lambda: bool(ended))


def test_half_of_the_descriptors_are_the_clusters() -> None:
    """In a process of its own: the limit cannot be raised again."""
    code = ("import resource as r; from flowspec_edge.serving.server import usual_limits as u;"
            "r.setrlimit(r.RLIMIT_NOFILE, (64, 200)); print(u().connections, r.getrlimit(r.RLIMIT_NOFILE))")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 200
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "100 (200, 200)\n"
