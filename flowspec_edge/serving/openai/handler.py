"""Runs one HTTP request from admission to its answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from flowspec_edge.runtime.request import Result
from flowspec_edge.serving import sse
from flowspec_edge.serving.admission import AdmissionQueue, Event, PendingRequest
from flowspec_edge.serving.openai.errors import ApiError, api_error
from flowspec_edge.serving.openai.prepare import PreparedRequest
from flowspec_edge.serving.openai.responses import Answer, Finish, TokenDecoder, TokenLogprob

_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 10.0  # proxies and clients give up on connections that are silent for 30 s and more


class ClientGone(Exception):
    """The client closed its connection."""


class StreamError(Exception):
    """An error that was sent to the client within its stream."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


class ResponseHandler:
    """pending  None if the request was not admitted
    finish   None if the answer is incomplete
    tokens   arrivals of the answer's tokens: (time.monotonic, count)
    """

    def __init__(self, admission: AdmissionQueue, prepared: PreparedRequest, answer: Answer, caller: str,
                 keep_alive_s: float) -> None:
        """``keep_alive_s``: seconds without a token after which a stream sends a status line."""
        self._admission, self._prepared = admission, prepared
        self._answer, self._caller = answer, caller
        self._keep_alive_s = keep_alive_s
        self._result: Result | None = None
        self.pending: PendingRequest | None = None
        self.finish: Finish | None = None
        self.tokens: list[tuple[float, int]] = []
        self._token_decoder = TokenDecoder(prepared.decode)
        self._logprobs_sent = 0  # tokens whose log-probabilities were sent
        self._ids: list[int] = []  # of the answer

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in one piece; raises ApiError or ClientGone."""
        async with self._events(receive) as (events, gone):
            text = "".join([piece async for piece in self._pieces(events, gone) if piece is not None])
        assert self.finish is not None
        answer = self._answer.complete(text, self.finish, self._usage(), self._logprobs(), self._details())
        await JSONResponse(answer, headers=self._headers())(scope, receive, send)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Answer as tokens come; the errors are the same until the first event or comment sends the headers.
        A later error is the stream's last event. Comments keep the connection alive while no token comes."""
        async with self._events(receive) as (events, gone):
            started, opening = False, self._answer.opening()
            try:
                async for piece in self._pieces(events, gone, self._keep_alive_s):
                    if not started:
                        await sse.begin(send, self._headers())
                        started = True
                    if piece is None:
                        assert self.pending is not None
                        status = self._admission.status_line(self.pending)
                        await sse.send_data(send, f": {status}\n\n".encode())
                        continue
                    logprobs = self._logprobs()
                    await _send(send, *opening,
                                *([self._answer.piece(piece, logprobs)] if piece or logprobs else []))
                    opening = []
            except ApiError as error:
                if not started:
                    raise
                await _send(send, error.body)
                await send({"type": "http.response.body", "body": b""})
                raise StreamError(error) from error
        assert self.finish is not None
        await _send(send, *self._answer.closing(self.finish, self._usage(), self._details()))
        await send({"type": "http.response.body", "body": _DONE})

    async def _pieces(self, events: asyncio.Queue[Event], gone: asyncio.Future[None],
                      patience: float | None = None) -> AsyncIterator[str | None]:
        """Yield text that is certain, starting with the first token; None after ``patience`` idle seconds."""
        detokenizer = self._prepared.detokenizer
        while self.finish is None:
            event = await _next(events, gone, patience)
            if event is None:
                yield None
            elif isinstance(event, Exception):
                raise api_error(event)
            elif isinstance(event, Result):
                last = detokenizer.close()
                self._result = event
                assert event.finish_reason != "cancelled"  # nothing of such a request is delivered
                self.finish = "stop" if detokenizer.stopped else event.finish_reason
                yield last
            else:
                before = detokenizer.tokens
                text = detokenizer.push(event)
                self.tokens.append((time.monotonic(), detokenizer.tokens - before))
                self._ids += event[:detokenizer.tokens - before]
                if detokenizer.stopped:
                    self.finish = "stop"
                yield text

    def _logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens read since the last call, if requested."""
        assert self.pending is not None
        new = self.pending.likelihoods[self._logprobs_sent:self._prepared.detokenizer.tokens]
        self._logprobs_sent += len(new)
        return self._token_decoder.decode(new)

    def _headers(self) -> dict[str, str]:
        """The request id that OpenAI's clients show, and the place in the queue at arrival."""
        assert self.pending is not None
        return {"x-request-id": self._answer.id, "x-flowspec-position": str(self.pending.position)}

    @property
    def energy_j(self) -> float | None:
        """Of the whole run; None if not measured, or if a stop string ended the answer."""
        return self._result.stats.energy_j if self._result else None

    def _details(self) -> dict[str, Any]:
        return self._answer.details(self._ids, self._result) if self._prepared.details else {}

    def _usage(self) -> dict[str, Any]:
        return self._answer.usage(self._prepared.detokenizer.tokens, self._result)

    @asynccontextmanager
    async def _events(self, receive: Receive) -> AsyncIterator[tuple[asyncio.Queue[Event],
                                                                     asyncio.Future[None]]]:
        """Submit the request; leaving this context cancels it."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended, and all connections with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        self.pending = pending = self._admission.submit(self._prepared.request, self._caller, deliver)
        gone = asyncio.ensure_future(sse.disconnected(receive))
        try:
            yield events, gone
        finally:
            self._admission.cancel(pending)
            gone.cancel()


async def _next(events: asyncio.Queue[Event], gone: asyncio.Future[None], patience: float | None
                ) -> Event | None:
    """Return the next event, or None after ``patience`` seconds; raises ClientGone."""
    coming = asyncio.ensure_future(events.get())
    either: set[asyncio.Future[Any]] = {coming, gone}
    try:
        await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientGone
        return coming.result() if coming.done() else None
    finally:
        coming.cancel()


async def _send(send: Send, *objects: dict[str, Any]) -> None:
    data = b"".join(b"data: " + json.dumps(item, ensure_ascii=False).encode() + b"\n\n" for item in objects)
    if data:
        await sse.send_data(send, data)
