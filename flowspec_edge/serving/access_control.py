"""Decides who may use the endpoints: by an API key or, if the server has none, by the request's Host header.

Also tells callers apart.

Decisions use the ASGI scope alone. Starlette builds ``request.url`` from the client's Host header, so the
path of that URL need not be the path that is served.
"""

from __future__ import annotations

import hmac
import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from flowspec_edge.d0.fair_queue import Caller
from flowspec_edge.serving.dashboard.pages import is_page
from flowspec_edge.serving.openai.errors import ApiError

_OCTET = rb"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LOOPBACK = re.compile(rb"(?:localhost|127(?:\." + _OCTET + rb"){3}|\[::1\])(?::([0-9]{1,5}))?",
                       re.IGNORECASE)
_MAX_PORT = 65535
_KEY = "flowspec.key"  # the scope's entry for the number of the key that the request had
_NETWORK_V6 = 64  # first bits of an IPv6 address: its network's, which the user cannot choose


class AccessMiddleware:
    """Checks the API keys, except on /health and on the page, which asks the user for the key.

    A server without a key listens on loopback only. But a browser on this machine may show a foreign page
    whose host name resolves to loopback (DNS rebinding), so the Host header must be one of loopback's own.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        """Take one or several keys, one a line of ``api_key``; each key is another caller."""
        self._app = app
        keys = None if api_key is None else [key.strip() for key in api_key.splitlines() if key.strip()]
        self._expected = None if keys is None else [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused.response(scope["path"]) if refused else self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path: str = scope["path"]
        if self._expected is None:
            # A path without a slash is an absolute target, which names a host of its own.
            if path.startswith("/") and is_loopback(_values(scope, b"host")):
                return None
            return ApiError(403, "without an API key this server answers to localhost and 127.0.0.1 only; "
                                 "the request names another host")
        if path == "/health" or is_page(path):
            return None
        client_keys = _client_keys(scope)
        matches = [max([hmac.compare_digest(client_key, key) for client_key in client_keys], default=False)
                   for key in self._expected]
        if any(matches):
            scope[_KEY] = str(matches.index(True))
            return None
        message = ("incorrect API key" if client_keys else
                   "no API key: send it as the header Authorization: Bearer KEY, or x-api-key: KEY")
        return ApiError(401, message, code="invalid_api_key")


def is_loopback(hosts: list[bytes]) -> bool:
    """Return whether there is one Host header, and it is localhost, 127.0.0.0/8 or [::1], with any port."""
    match = _LOOPBACK.fullmatch(hosts[0]) if len(hosts) == 1 else None
    return match is not None and int(match[1] or 0) <= _MAX_PORT


def _client_keys(scope: Scope) -> list[bytes]:
    """Return the keys that a request has, as OpenAI's clients send them and as Anthropic's do."""
    keys = []
    for header in _values(scope, b"authorization")[:1]:
        scheme, _, token = header.partition(b" ")
        keys.append(token.strip() if scheme.lower() == b"bearer" else b"")  # a scheme's case does not matter
    return keys + [header.strip() for header in _values(scope, b"x-api-key")[:1]]


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def caller_of(scope: Scope, user: str | None) -> Caller:
    """Return a request's caller: API key, address, ``user``.

    An IPv6 address is replaced by its network. Behind a trusted proxy, the address is the one that the proxy names.
    """
    host = scope["client"][0] if scope.get("client") else ""
    try:
        address = ipaddress.ip_address(host)
        if address.version == 6:
            host = str(ipaddress.ip_network((address, _NETWORK_V6), strict=False))
    except ValueError:  # a proxy may name anything
        pass
    return scope.get(_KEY, ""), host, user or ""
