"""Those who watch: what each of them has not been sent yet, and no more of it than fits.

Knows which events make older ones of their kind worthless.  Does not know HTTP.  All in one thread,
that of the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

_STATES = ("cluster", "boards", "figures")  # the newest says it all
_MOST = 64  # events that wait; about six seconds of them


class Viewer:
    """A queue that forgets: a slow viewer loses old events and delays nobody."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._some = asyncio.Event()

    def put(self, name: str, data: bytes) -> None:
        """Queue an event."""
        if name in _STATES:
            self._waiting = deque(item for item in self._waiting if item[0] != name)
        self._waiting.append((name, data))
        if len(self._waiting) > _MOST:
            oldest = next(i for i, item in enumerate(self._waiting) if item[0] not in _STATES)
            del self._waiting[oldest]
        self._some.set()

    async def take(self) -> bytes:
        """Everything that waits; something, once there is."""
        await self._some.wait()
        self._some.clear()
        data = b"".join(data for _, data in self._waiting)
        self._waiting.clear()
        return data


def encoded(name: str, event: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(event, ensure_ascii=False, default=_plain)}\n\n".encode()


def _plain(number: Any) -> float:
    """numpy's numbers are numbers."""
    return float(number)
