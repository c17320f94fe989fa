"""Streams of server-sent events as ASGI has them: how one begins, and when its client has gone.

Does not know what the events say.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive, Send

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache",
            "x-accel-buffering": "no"}  # a proxy must not wait for more


async def begin(send: Send, headers: Mapping[str, str] | None = None) -> None:
    """Status 200 and the headers of such a stream, ``headers`` beside them."""
    both = _HEADERS | dict(headers or {})
    await send({"type": "http.response.start", "status": 200,
                "headers": [(name.encode(), value.encode()) for name, value in both.items()]})


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
