"""Server-sent events over ASGI, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

T = TypeVar("T")

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


async def wait_unless_disconnected(coming: Awaitable[T], disconnection: asyncio.Future[None],
                                   patience: float | None = None) -> T | None:
    """Return what ``coming`` returns, or None after ``patience`` seconds.

    Raises ClientDisconnect when ``disconnection`` (:func:`disconnected`) is done. ``coming`` is cancelled if it has
    not ended.
    """
    task = asyncio.ensure_future(coming)
    try:
        await asyncio.wait((task, disconnection), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if disconnection.done():
            raise ClientDisconnect
        return task.result() if task.done() else None
    finally:
        task.cancel()
