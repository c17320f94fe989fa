"""Reads request bodies with bounded memory, and prepares them in threads.

Tokenizers, chat templates and grammars take up to seconds. The event loop, which serves all clients, does not
wait for them; and each kind of work has its own threads, so that quick work does not wait for slow work.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from flowspec_edge.d0.fair_queue import Caller, FairQueue
from flowspec_edge.model.untrusted.processes import cancelled_by
from flowspec_edge.serving import sse
from flowspec_edge.serving.openai.errors import ApiError

T = TypeVar("T")

MAX_BODY_BYTES = 2 * 2**20  # longer than any prompt that a model served here has room for
_MAX_HELD_BYTES = 8 * MAX_BODY_BYTES  # of all bodies that are being read or prepared
_RETRY_S = 5
_THREADS, _MAX_JOBS = 2, 32  # for each kind of work; waiting jobs are counted, too
# A caller's ``user`` is known only after its body is parsed, so bodies cannot be limited by user before that.
# The limits of connections and bytes bound them.
_MAX_BODIES = 512

Work = Literal["body", "text", "template", "grammar"]


class Intake:
    """For the event loop's thread."""

    def __init__(self, max_held_bytes: int = _MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._lanes: dict[Work, _Lane] = {"body": _Lane(_MAX_BODIES), "text": _Lane(), "template": _Lane(),
                                          "grammar": _Lane()}

    @asynccontextmanager
    async def body(self, http: Request) -> AsyncIterator[bytes]:
        """Read a body, which counts as held until the context ends.

        ApiError if it is too large, or may have been sent by a foreign web page.
        """
        if not _says_json(http.headers):
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

    async def run(self, work: Work, caller: Caller, do: Callable[[], T], receive: Receive) -> T:
        """Call ``do`` in a thread, in the caller's turn, and return its result.

        ApiError if too many jobs wait; ClientDisconnect when the client disconnects, which also cancels work of
        ``do`` in a process with limits.

        work  "body": parsing; "text": tokenising; "template": with a chat template; "grammar": compiling
        """
        disconnection = asyncio.ensure_future(sse.disconnected(receive))
        try:
            return cast("T", await sse.wait_unless_disconnected(self._lanes[work].run(caller, do), disconnection))
        finally:
            disconnection.cancel()


def _says_json(headers: Headers) -> bool:
    """Whether the body is called JSON, or is not called anything by a program that is no browser.

    A foreign web page cannot call a body JSON without a CORS preflight. Without a type, or with the one that
    ``curl -d`` names, it can send one; but browsers then say where the page is from. Ollama reads such bodies as
    JSON, so programs for it send them.
    """
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if kind in ("", "application/x-www-form-urlencoded"):
        return not any(name in headers for name in ("origin", "referer", "sec-fetch-site"))
    return kind == "application/json"


@dataclass(eq=False)
class _Job:
    caller: Caller
    do: Callable[[], Any]
    done: asyncio.Future[Any]
    cancelled: threading.Event = field(default_factory=threading.Event)
    running: bool = False

    def __call__(self) -> Any:
        with cancelled_by(self.cancelled):
            return self.do()


class _Lane:
    """The threads for one kind of work, and their queue. A caller has at most one of the threads."""

    def __init__(self, max_jobs: int = _MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._threads = ThreadPoolExecutor(_THREADS, "prepare")
        self._jobs: FairQueue[_Job] = FairQueue(time.monotonic, 1.0, places=_THREADS)

    async def run(self, caller: Caller, do: Callable[[], T]) -> T:
        if not self._jobs.admits(caller, self._max_jobs):
            raise ApiError(429, f"{self._max_jobs} requests are being prepared, your share among them; try "
                                f"again in {_RETRY_S} s", code="rate_limit_exceeded", retry_after=_RETRY_S)
        job = _Job(caller, do, asyncio.get_running_loop().create_future())
        self._jobs.put(caller, job)
        self._start()
        try:
            result: T = await job.done
            return result
        finally:
            job.cancelled.set()
            if not job.running:
                self._jobs.discard(job)

    def _start(self) -> None:
        """Start the next jobs while threads are free.

        Stop at the first job whose caller already has one: no job of a caller without a thread comes after it.
        """
        for job in self._jobs:
            if not self._jobs.has_turn() or any(job.caller == other.caller for other in self._jobs.placed):
                return
            self._jobs.take()
            job.running = True
            running = asyncio.get_running_loop().run_in_executor(self._threads, job)
            running.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._jobs.discard(job)
        error = running.exception()
        if not job.done.done():  # its client is still there
            if error:
                job.done.set_exception(error)
            else:
                job.done.set_result(running.result())
        self._start()
