"""Addresses as they are written in URLs, and the origins of web pages."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listen addresses that a client cannot connect to


def place_of(host: str, port: int | str) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on ``host``."""
    return f"http://{place_of(_ALL.get(host, host), port)}"


def origin_problem(origin: str) -> str:
    """Why ``origin`` is none of a web page, as browsers send it; empty: it is one, or "*"."""
    if origin == "*" or _ORIGIN.fullmatch(origin):
        return ""
    parts = urlsplit(origin) if "://" in origin else None
    advice = (f", such as {parts.scheme.lower()}://{parts.netloc.lower()}" if parts and parts.netloc
              else ", such as http://localhost:3000")
    return f"{origin!r} is not an origin: give scheme, host and port without a path{advice}; or * for all"
