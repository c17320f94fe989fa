"""One request of a client, from the desk back to its socket: whole or as server-sent events.

Knows ASGI and when a client has gone.  Does not know what is asked for or how it is computed.
"""

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
from flowspec_edge.serving import event_streams
from flowspec_edge.serving.answers import Answer, Finish
from flowspec_edge.serving.asking import Asked
from flowspec_edge.serving.desk import Desk, Event, Ticket
from flowspec_edge.serving.errors import ApiError, api_error
from flowspec_edge.serving.logprobs import Spelled, Speller

_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 10.0  # proxies and clients give up on connections that are silent for 30 s and more


class ClientGone(Exception):
    """The client closed its connection; nobody is left to be told anything."""


class Reply:
    """The answer to one request, on its way.

    After it: ``ticket``, None if the desk refused it; ``finish``, None if it did not come to its end;
    ``tokens``, when (time.monotonic) how many of the answer's came.
    """

    def __init__(self, desk: Desk, asked: Asked, answer: Answer, caller: str,
                 keep_alive_s: float = KEEP_ALIVE_S) -> None:
        """``keep_alive_s``: seconds without a token after which a stream says why."""
        self._desk, self._asked, self._answer, self._caller = desk, asked, answer, caller
        self._keep_alive_s = keep_alive_s
        self._result: Result | None = None
        self.ticket: Ticket | None = None
        self.finish: Finish | None = None
        self.tokens: list[tuple[float, int]] = []
        self._speller = Speller(asked.decode)
        self._told = 0  # tokens whose likelihood has been told
        self._ids: list[int] = []  # of the answer

    async def whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in one piece; ApiError if there is none, ClientGone if nobody wants it any more."""
        async with self._events(receive) as (events, gone):
            text = "".join([piece async for piece in self._pieces(events, gone) if piece is not None])
        assert self.finish is not None
        answer = self._answer.whole(text, self.finish, self._usage(), self._likely(), self._details())
        await JSONResponse(answer, headers=self._headers())(scope, receive, send)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Answer as it comes; the errors are the same as long as nothing was sent.

        What goes wrong later is the stream's last event, which clients raise.  While no token comes a
        comment now and then, which clients ignore, keeps the connection alive, the first with the headers.
        """
        async with self._events(receive) as (events, gone):
            started, opening = False, self._answer.opening()
            try:
                async for piece in self._pieces(events, gone, self._keep_alive_s):
                    if not started:
                        await event_streams.begin(send, self._headers())
                        started = True
                    if piece is None:
                        await _comment(send, self._note())
                        continue
                    likely = self._likely()
                    await _send(send, *opening,
                                *([self._answer.piece(piece, likely)] if piece or likely else []))
                    opening = []
            except ApiError as error:
                if not started:
                    raise
                await _send(send, error.body)
                await send({"type": "http.response.body", "body": b""})
                raise Told(error) from error
        assert self.finish is not None
        await _send(send, *self._answer.closing(self.finish, self._usage(), self._details()))
        await send({"type": "http.response.body", "body": _DONE})

    async def _pieces(self, events: asyncio.Queue[Event], gone: asyncio.Future[None],
                      patience: float | None = None) -> AsyncIterator[str | None]:
        """The text as it becomes certain, the first piece when the first token has come; None whenever
        nothing has come for ``patience`` seconds."""
        reader = self._asked.reader
        while self.finish is None:
            event = await _next(events, gone, patience)
            if event is None:
                yield None
            elif isinstance(event, Exception):
                raise api_error(event)
            elif isinstance(event, Result):
                last = reader.close()
                self._result = event
                assert event.finish_reason != "cancelled"  # the desk delivers nothing of such a request
                self.finish = "stop" if reader.stopped else event.finish_reason
                yield last
            else:
                before = reader.tokens
                text = reader.push(event)
                self.tokens.append((time.monotonic(), reader.tokens - before))
                self._ids += event[:reader.tokens - before]
                if reader.stopped:
                    self.finish = "stop"
                yield text

    def _likely(self) -> list[Spelled]:
        """How likely the tokens were that were read since the last call, if that is wanted."""
        assert self.ticket is not None
        new = self.ticket.likelihoods[self._told:self._asked.reader.tokens]
        self._told += len(new)
        return self._speller.spell(new)

    def _headers(self) -> dict[str, str]:
        """What OpenAI's clients show as the request's id, and how many were before it."""
        assert self.ticket is not None
        return {"x-request-id": self._answer.id, "x-flowspec-position": str(self.ticket.position)}

    def _note(self) -> str:
        assert self.ticket is not None
        return self._desk.note(self.ticket)

    def _details(self) -> dict[str, Any]:
        return self._answer.details(self._ids, self._result) if self._asked.details else {}

    def _usage(self) -> dict[str, Any]:
        return self._answer.usage(self._asked.reader.tokens, self._result)

    @asynccontextmanager
    async def _events(self, receive: Receive) -> AsyncIterator[tuple[asyncio.Queue[Event],
                                                                     asyncio.Future[None]]]:
        """At the desk; leaving it tells the desk that nobody waits any more."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended, and all connections with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        ticket = self.ticket = self._desk.submit(self._asked.request, self._caller, deliver)
        gone = asyncio.ensure_future(event_streams.gone(receive))
        try:
            yield events, gone
        finally:
            self._desk.cancel(ticket)
            gone.cancel()


class Told(Exception):
    """An error that the client was told within its stream."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


async def _next(events: asyncio.Queue[Event], gone: asyncio.Future[None], patience: float | None
                ) -> Event | None:
    """The next event, or ClientGone; None if neither comes within ``patience`` seconds."""
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
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _comment(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": f": {text}\n\n".encode(), "more_body": True})
