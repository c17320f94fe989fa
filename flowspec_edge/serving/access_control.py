"""Who may use the endpoints: an API key or, without one, the Host that a request names; and who calls.

Decisions rest on the ASGI scope alone. Starlette's ``request.url`` is put together from the client's Host
header, so its path need not be the path that is served.
"""

from __future__ import annotations

import hmac
import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from flowspec_edge.serving.dashboard.pages import is_page
from flowspec_edge.serving.fair_queue import Caller
from flowspec_edge.serving.openai.errors import ApiError

_OCTET = rb"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LOOPBACK = re.compile(rb"(?:localhost|127(?:\." + _OCTET + rb"){3}|\[::1\])(?::([0-9]{1,5}))?",
                       re.IGNORECASE)
_MAX_PORT = 65535
_KEY = "flowspec.key"  # in the scope: which key a request had
_NETWORK_V6 = 64  # bits of an IPv6 address that its user did not choose


class AccessMiddleware:
    """Checks the API keys, except on /health and the page, which asks its user for the key.

    Without a key only this machine can reach the server. That includes browsers, in which a foreign page's
    name may resolve to loopback (DNS rebinding), so the Host must be one of loopback's own.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        """``api_key``: one or several, one a line; each is a caller of its own."""
        self._app = app
        keys = None if api_key is None else [key.strip() for key in api_key.splitlines() if key.strip()]
        self._expected = None if keys is None else [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused.response() if refused else self._app)(scope, receive, send)

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
        given = _values(scope, b"authorization")
        known = [hmac.compare_digest(given[0], key) for key in self._expected] if given else []
        if any(known):
            scope[_KEY] = str(known.index(True))
            return None
        message = ("incorrect API key" if given else
                   "no API key: send it as the header Authorization: Bearer KEY")
        return ApiError(401, message, code="invalid_api_key")


def is_loopback(hosts: list[bytes]) -> bool:
    """Return whether there is one Host header, and it is localhost, 127.0.0.0/8 or [::1], with any port."""
    found = _LOOPBACK.fullmatch(hosts[0]) if len(hosts) == 1 else None
    return found is not None and int(found[1] or 0) <= _MAX_PORT


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def caller_of(scope: Scope, user: str | None) -> Caller:
    """Return a request's caller: its API key, its address, its ``user``. An IPv6 address counts by its
    network; behind a trusted proxy the address is the one that the proxy names."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        address = ipaddress.ip_address(host)
        if address.version == 6:
            host = str(ipaddress.ip_network((address, _NETWORK_V6), strict=False))
    except ValueError:  # a proxy may name anything
        pass
    return scope.get(_KEY, ""), host, user or ""
