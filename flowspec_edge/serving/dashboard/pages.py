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
    """Every file is read here, once: a client's name is looked up, and never becomes a path."""
    files = {file.name: Response(file.read_bytes(), headers={**_HEADERS, "content-type": _TYPES[file.suffix]})
             for file in _DIRECTORY.iterdir() if file.suffix in _TYPES}

    async def index(http: Request) -> Response:
        return files["index.html"]

    async def page_file(http: Request) -> Response:
        try:
            return files[http.path_params["name"]]
        except KeyError:
            raise HTTPException(404) from None

    return [Route("/", index), Route("/page/{name}", page_file)]
