"""Request bodies: read with bounded memory, and prepared in a thread of their own.

Tokenizers and chat templates take up to seconds for a long prompt. The event loop, which serves every other
client, does not wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from flowspec_edge.serving.openai.errors import ApiError

T = TypeVar("T")

MAX_BODY_BYTES = 2 * 2**20  # no model served here has room for a prompt of that size
_MAX_HELD_BYTES = 8 * MAX_BODY_BYTES  # of all bodies that are being read or prepared
_RETRY_S = 5


class Intake:
    """For the event loop's thread. Requests are prepared one after the other."""

    def __init__(self, max_held_bytes: int = _MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._thread = ThreadPoolExecutor(1, "prepare")

    @asynccontextmanager
    async def body(self, http: Request) -> AsyncIterator[bytes]:
        """Read a body, which counts as held until the context ends. ApiError if it is too large or not JSON,
        which a foreign web page cannot send without a CORS preflight."""
        if http.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(400, "send the body as JSON, with the header Content-Type: application/json")
        data = bytearray()
        try:
            async for chunk in http.stream():
                data += chunk
                self._held_bytes += len(chunk)
                if len(data) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
                if self._held_bytes > self._max_held_bytes:
                    raise ApiError(503, "the server is reading too many long requests; try again in "
                                        f"{_RETRY_S} s", code="overloaded", retry_after=_RETRY_S)
            yield bytes(data)
        finally:
            self._held_bytes -= len(data)

    async def run(self, prepare: Callable[[], T]) -> T:
        """Return the result of ``prepare``, called in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, prepare)
