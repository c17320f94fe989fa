"""Server-sent events over ASGI."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive, Send

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache",
            "x-accel-buffering": "no"}  # a proxy must not buffer events


async def begin(send: Send, headers: Mapping[str, str] | None = None) -> None:
    """Send status 200 and the headers of an event stream."""
    both = _HEADERS | dict(headers or {})
    await send({"type": "http.response.start", "status": 200,
                "headers": [(name.encode(), value.encode()) for name, value in both.items()]})


async def send_data(send: Send, data: bytes) -> None:
    """Send encoded events and keep the stream open."""
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
