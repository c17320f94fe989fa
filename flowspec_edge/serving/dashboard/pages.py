"""The page's static files at / and below /page, with headers that forbid loading anything from elsewhere."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_DIRECTORY = Path(__file__).resolve().parent / "page"
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
                               "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def is_page(path: str) -> bool:
    """Return whether ``path`` belongs to the page, whose files hold no secret and need no key."""
    return path == "/" or path.startswith("/page/")


def page_routes() -> list[Route]:
    return [Route("/", _index), Route("/page/{name}", _file)]


async def _index(http: Request) -> Response:
    return _answer("index.html")


async def _file(http: Request) -> Response:
    return _answer(http.path_params["name"])


def _answer(name: str) -> Response:
    """{name} matches no slash, so no file outside the directory can be served."""
    path = _DIRECTORY / name
    if path.suffix not in _TYPES or not path.is_file():
        raise HTTPException(404)
    return Response(path.read_bytes(), headers={**_HEADERS, "content-type": _TYPES[path.suffix]})
