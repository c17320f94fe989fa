"""What a request may not do by its Host, its target or its path, with a key and without."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.http_server import Held, running, served
from kits.process_clusters import PATIENCE
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowspec_edge.serving.access_control import AccessMiddleware, caller_of, is_loopback
from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.app import make_app
from flowspec_edge.serving.server import listen, listening, url_of

KEY = "correct horse"
# Names that a parser of URLs cannot read, or reads as another one.
ODD_HOSTS = (b"localhost/page/?", b"localhost/page/#", b"localhost\\@evil.example", b'a"b.evil.example',
             b"evil.example:99999", b"user@127.0.0.1", b"127.0.0.1@evil.example", b"a`b.evil.example",
             b"a{b}.evil.example", b"localhost:", b"localhost:99999", b"localhost:8 0", b"localhost.", b"",
             b"127.0.0.1.evil.example", b"127.1", b"127.0.0.01", b"0127.0.0.1", b"127.0.0.256", b"128.0.0.1",
             b"0.0.0.0", b"::1", b"[::1", b"[::2]", b"[::1]evil.example", b"localhost\xff", b"localhost,evil")


async def answered(app: ASGIApp, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, dict[str, Any]]:
    """The app's answer to a scope that no server had to let through."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "GET", "scheme": "http", "path": path,
                    "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
                    "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
                    "asgi": {"version": "3.0"}}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(part.get("body", b"") for part in sent[1:]))


@pytest.mark.parametrize("host", ODD_HOSTS)
def test_no_host_makes_up_for_the_key(model: Path, host: bytes) -> None:
    what = served(model)
    app = make_app(Admission(what.probe()), what, KEY)
    status, body = asyncio.run(answered(app, "/v1/models", [(b"host", host)]))
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("hosts", [*((host,) for host in ODD_HOSTS), (), (b"localhost", b"localhost"),
                                   (b"localhost", b"evil.example")])
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/"])
def test_without_a_key_only_loopback_hosts_are_served(
        model: Path, hosts: tuple[bytes, ...], path: str) -> None:
    what = served(model)
    app = make_app(Admission(what.probe()), what)
    status, body = asyncio.run(answered(app, path, [(b"host", host) for host in hosts]))
    assert status == 403
    assert "names another host" in body["error"]["message"]


@given(st.text(st.characters(codec="latin-1"), max_size=30)
       | st.tuples(st.sampled_from(["localhost", "127.0.0.1", "[::1]", "evil.example"]),
                   st.text("0123456789:@/\\?#.[] a", max_size=6)).map("".join))
def test_only_loopback_and_its_ports_are_let_in(text: str) -> None:
    name, _, port = text.rpartition(":") if text.rpartition("]")[2].count(":") == 1 else (text, "", "0")
    parts = name.split(".")
    plain = name.lower() == "localhost" or name == "[::1]" or (
        len(parts) == 4 and parts[0] == "127"
        and all(part.isascii() and part.isdigit() and str(int(part)) == part and int(part) < 256
                for part in parts))
    fits = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    assert is_loopback([text.encode("latin-1")]) == (plain and fits)


def test_the_page_and_health_alone_need_no_key(model: Path) -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    gate = AccessMiddleware(app, KEY)
    for path, status in (("/", 200), ("/page/main.js", 200), ("/health", 200), ("/page", 401), ("//", 401),
                         ("/healthy", 401), ("", 401), ("http://localhost/page/", 401), ("/v1/models", 401),
                         ("/V1/models", 401), ("/live", 401), ("/metrics", 401), ("/x/page/", 401)):
        assert asyncio.run(answered(gate, path, [(b"host", b"localhost")]))[0] == status, path


def raw(url: str, head: bytes) -> int:
    """The status of the answer to bytes on a socket."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(head)
        return int(connection.makefile("rb").readline().split()[1])


def test_the_same_over_a_socket(held: Held, model: Path) -> None:
    with running(served(model), held) as server:
        for line in (b"Host: localhost", b"hOsT: 127.0.0.1:80", b"Host:[::1]"):
            assert raw(server.url, b"GET /v1/models HTTP/1.1\r\n" + line + b"\r\n\r\n") == 200
        for host in ODD_HOSTS:  # 400: the server does not read such a header at all
            head = b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
            assert raw(server.url, head) in (400, 403), host
        for head in (b"GET /v1/models HTTP/1.0\r\n\r\n", b"GET /v1/models HTTP/1.1\r\n\r\n",
                     b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
                     b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"):
            assert raw(server.url, head) in (400, 403), head
    with running(served(model), held, api_key=KEY) as server:
        for host in (b"localhost/page/?", b"localhost/health?", b"/page/"):
            head = b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
            assert raw(server.url, head) in (400, 401), host


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(caller_of(scope, "me"))(scope, receive, send)


@pytest.mark.parametrize(("trusted", "address"), [("", "127.0.0.1"), ("127.0.0.1", "203.0.113.5"),
                                                  ("10.0.0.0/8", "127.0.0.1")])
def test_an_address_is_taken_from_a_trusted_proxy_only(model: Path, trusted: str, address: str) -> None:
    listener = listen("127.0.0.1", 0, None)
    admission = Admission(served(model).probe())
    with listening(listener, AccessMiddleware(echo, None), admission, trusted_proxies=trusted):
        answer = httpx2.get(url_of(listener), headers={"X-Forwarded-For": "198.51.100.1, 203.0.113.5"},
                            timeout=PATIENCE)
    assert answer.json() == ["", address, "me"]


def test_each_key_is_a_caller_and_no_part_of_one_is_a_key() -> None:
    gate = AccessMiddleware(echo, f"{KEY}\nanother\n")
    for key, caller in ((KEY, "0"), ("another", "1")):
        status, found = asyncio.run(answered(gate, "/v1", [(b"authorization", f"Bearer {key}".encode())]))
        assert (status, found) == (200, [caller, "127.0.0.1", "me"])
    for wrong in ("correct", "horse", "", f"{KEY}\nanother"):
        assert asyncio.run(answered(gate, "/v1", [(b"authorization", f"Bearer {wrong}".encode())]))[0] == 401


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer ", "bEaReR  "])
def test_the_schemes_case_and_the_spaces_after_it_do_not_matter(scheme: str) -> None:
    """As HTTP has it (RFC 9110, 11.1)."""
    gate = AccessMiddleware(echo, KEY)
    assert asyncio.run(answered(gate, "/v1", [(b"authorization", f"{scheme} {KEY}".encode())]))[0] == 200
    for wrong in (f"{scheme}{KEY}".replace(" ", ""), f"Basic {KEY}", f"Token {KEY}", KEY, scheme):
        assert asyncio.run(answered(gate, "/v1", [(b"authorization", wrong.encode())]))[0] == 401


def test_an_ipv6_client_is_its_network() -> None:
    one, other = ({"client": (f"2001:db8::{end}", 1)} for end in ("1", "ffff"))
    assert caller_of(one, None) == caller_of(other, None) == ("", "2001:db8::/64", "")
    assert caller_of({"client": None}, None) == ("", "", "")
