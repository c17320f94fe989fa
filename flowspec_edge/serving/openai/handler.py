"""Runs one HTTP request from admission to its answer, and collects each of the answer's choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from flowspec_edge.d0.fair_queue import Caller
from flowspec_edge.d0.request import Request, Result
from flowspec_edge.serving import sse
from flowspec_edge.serving.admission import Admission, Event, PendingRequest
from flowspec_edge.serving.openai.detokenize import ToolCallParser
from flowspec_edge.serving.openai.errors import ApiError, api_error
from flowspec_edge.serving.openai.field_table import printable_names
from flowspec_edge.serving.openai.prepare import PreparedRequest
from flowspec_edge.serving.openai.reasoning import ReasoningPiece
from flowspec_edge.serving.openai.responses import Answer, AnswerPiece, Finish, TokenDecoder, TokenLogprob


class Choice:
    """One of the answers that a request asks for.

    pending           its place in the queue or the cluster
    finish            None if it is incomplete
    result            None if it is incomplete, or a stop string ended it
    ids               its token ids, without those after a stop string
    reasoning_tokens  how many of them are reasoning; 0 if the model's reasoning is not told apart
    """

    def __init__(self, index: int, request: Request, prepared: PreparedRequest, pending: PendingRequest
                 ) -> None:
        self.index, self.request, self.pending = index, request, pending
        self.finish: Finish | None = None
        self.result: Result | None = None
        self.ids: list[int] = []
        self._detokenizer = prepared.detokenizer(request)
        self._shown_ends = prepared.shown_ends
        self.reasoning_tokens = 0
        self._reasoning, self._silent = prepared.reasoning_parser(), prepared.silent
        self._parser = ToolCallParser(prepared.calls) if prepared.calls else None
        self._token_decoder = TokenDecoder(prepared.decode)
        self._sent_logprobs = 0  # tokens whose log-probabilities were sent

    def read(self, event: Event) -> list[AnswerPiece]:
        """Return text, reasoning and parts of tool calls that are certain now; ApiError if the request failed."""
        if isinstance(event, Exception):
            raise api_error(event)
        if isinstance(event, Result):
            assert event.finish_reason != "cancelled"  # nothing of such a request is delivered
            self.result = event
            self.finish = "stop" if self._detokenizer.stopped else event.finish_reason
            stop_is_shown = event.stop_id in self._shown_ends and not self._detokenizer.stopped
            ending = self._detokenizer.end(event.stop_id) if stop_is_shown and event.stop_id is not None else ""
            return self._parsed(ending + self._detokenizer.close(), last=True)
        before = self.tokens
        pieces: list[AnswerPiece] = []
        for tokens in [[token] for token in event] if self._reasoning else [event]:  # to count them
            text = self._detokenizer.push(tokens)
            if self._detokenizer.stopped:
                self.finish = "stop"
            pieces += self._parsed(text, last=self._detokenizer.stopped)
            if self._reasoning and self._reasoning.inside:
                self.reasoning_tokens += 1
            if self._detokenizer.stopped:
                break
        self.ids += event[:self.tokens - before]
        return _joined(pieces)

    def _parsed(self, text: str, last: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = [text] if text else []
        if self._reasoning is not None:
            split = [*self._reasoning.push(text), *(self._reasoning.close() if last else ())]
            pieces = [piece for piece in split if isinstance(piece, str) or not self._silent]
        if self._parser is None:
            return pieces
        parsed: list[AnswerPiece] = []
        for piece in pieces:
            parsed += self._parser.push(piece) if isinstance(piece, str) else [piece]
        parsed += self._parser.close() if last else []
        if self.finish == "stop" and self._parser.calls:
            self.finish = "tool_calls"
        return parsed

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._detokenizer.stop

    @property
    def tokens(self) -> int:
        """How many tokens were read, up to the one that completed a stop string."""
        return self._detokenizer.tokens

    def new_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens read since the last call, if requested."""
        new = self.pending.likelihoods[self._sent_logprobs:self.tokens]
        self._sent_logprobs += len(new)
        return self._token_decoder.decode(new)


def _joined(pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
    """Neighbours of one kind as one piece, however many tokens came together."""
    joined: list[AnswerPiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif isinstance(piece, ReasoningPiece) and isinstance(last, ReasoningPiece):
            joined[-1] = ReasoningPiece(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


_Arrival = tuple[int, Event]  # a choice's index and what came for it
KEEP_ALIVE_S = 10.0  # proxies and clients give up on connections that are silent for 30 s and more


class StreamError(Exception):
    """An error that the client got within its stream."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


class ResponseHandler:
    """Answers a request; ``choices``: empty if the request was not admitted."""

    def __init__(self, admission: Admission, prepared: PreparedRequest, answer: Answer, caller: Caller,
                 keep_alive_s: float, on_tokens: Callable[[int], None]) -> None:
        """Set up a request's handler.

        keep_alive_s  seconds without a token after which a stream sends a status line
        on_tokens     called when tokens come, with the number of those that belong to the answer
        """
        self._admission, self._prepared = admission, prepared
        self._answer, self._caller = answer, caller
        self._keep_alive_s = keep_alive_s
        self.choices: list[Choice] = []
        self._on_tokens = on_tokens

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in one piece; raises ApiError or ClientDisconnect."""
        async with self._events(receive) as (events, disconnection):
            answers: list[list[AnswerPiece]] = [[] for _ in self.choices]
            async for choice, pieces in self._pieces(events, disconnection):
                if choice is not None:
                    answers[choice.index] += pieces
        texts = [self._answer.choice(choice.index, pieces, choice.finish, choice.new_logprobs(),
                                     self._details(choice) if len(answers) > 1 else {}, choice.stop)
                 for choice, pieces in zip(self.choices, answers, strict=True)]
        alone = self._details(self.choices[0]) if len(answers) == 1 else {}
        answer = self._answer.complete(texts, self._usage(), self._figures(), alone)
        headers = {name: value for name, value in self._headers().items() if name != "content-type"}
        await JSONResponse(answer, headers=headers)(scope, receive, send)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Answer as tokens come; the errors are the same until the first event or comment sends the headers.

        A later error is the stream's last event. Comments keep the connection alive while no token comes.
        """
        async with self._events(receive) as (events, disconnection):
            started, opened = False, set[int]()
            try:
                async for choice, pieces in self._pieces(events, disconnection, self._keep_alive_s):
                    if not started:
                        await sse.begin(send, self._headers())
                        started = True
                    if choice is None:
                        await sse.send_data(send, self._answer.keep_alive(self._status_line()))
                        continue
                    opening = [] if choice.index in opened else self._answer.opening(choice.index)
                    opened.add(choice.index)
                    await self._send(send, *opening,
                                     *self._answer.pieces(choice.index, pieces, choice.new_logprobs()))
                    if choice.finish:
                        await self._send(send, *self._answer.closing(choice.index, choice.finish,
                                                                     self._details(choice), choice.stop))
            except ApiError as error:
                if not started:
                    raise
                await self._send(send, self._answer.failure(error))
                await send({"type": "http.response.body", "body": b""})
                raise StreamError(error) from error
        await self._send(send, *self._answer.counts(self._usage(), self._figures()))
        await send({"type": "http.response.body", "body": self._answer.end})

    async def _send(self, send: Send, *objects: dict[str, Any]) -> None:
        if data := b"".join(map(self._answer.encoded, objects)):
            await sse.send_data(send, data)

    async def _pieces(self, events: asyncio.Queue[_Arrival], disconnection: asyncio.Future[None],
                      patience: float | None = None
                      ) -> AsyncIterator[tuple[Choice | None, list[AnswerPiece]]]:
        """Yield what is certain of each choice, starting with the first token; None after ``patience`` idle seconds."""
        while any(choice.finish is None for choice in self.choices):
            arrival = await sse.wait_unless_disconnected(events.get(), disconnection, patience)
            if arrival is None:
                yield None, []
                continue
            index, event = arrival
            choice = self.choices[index]
            is_finished, before = choice.finish is not None, choice.tokens
            if is_finished:
                continue  # arrived after a stop string had ended this choice
            pieces = choice.read(event)
            if choice.tokens > before:
                self._answer.arrived()
                self._on_tokens(choice.tokens - before)
            if choice.finish:
                self._admission.cancel(choice.pending)  # after a stop string it would go on
            yield choice, pieces

    def _status_line(self) -> str:
        waiting = next(choice for choice in self.choices if choice.finish is None)
        return self._admission.status_line(waiting.pending)

    def _headers(self) -> dict[str, str]:
        """Return the headers of an answer.

        They are the request id that OpenAI's clients show, the place in the queue at arrival, and the request's
        fields that
        have no effect.
        """
        ignored = ", ".join(printable_names(self._prepared.ignored)).replace("…", "...")
        return {**self._answer.headers, "x-request-id": self._answer.id,
                "x-flowspec-position": str(self.choices[0].pending.position),
                **({"x-flowspec-ignored": ignored} if ignored else {})}

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    @property
    def energy_j(self) -> float | None:
        """Energy of the whole run; None if not measured, or if a stop string ended an answer."""
        spent = [choice.result.stats.energy_j if choice.result else None for choice in self.choices]
        measured = [joules for joules in spent if joules is not None]
        return sum(measured) if measured and len(measured) == len(spent) else None

    def _details(self, choice: Choice) -> dict[str, Any]:
        return self._answer.details(choice.ids, choice.result) if self._prepared.details else {}

    def _figures(self) -> dict[str, Any]:
        return self._answer.figures([choice.result for choice in self.choices])

    def _usage(self) -> dict[str, Any]:
        return self._answer.usage(self.completion_tokens, [choice.result for choice in self.choices],
                                  sum(choice.reasoning_tokens for choice in self.choices))

    @asynccontextmanager
    async def _events(self, receive: Receive) -> AsyncIterator[tuple[asyncio.Queue[_Arrival],
                                                                     asyncio.Future[None]]]:
        """Submit a request for each choice; leaving this context cancels them."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[_Arrival] = asyncio.Queue()

        def deliver(index: int, event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended, and all connections with it
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        disconnection = asyncio.ensure_future(sse.disconnected(receive))
        try:
            requests = self._prepared.choices()
            if len(requests) > (limit := self._admission.places):
                param = "n" if len(self._prepared.prompts) == 1 else "prompt"
                raise ApiError(400, f"{param}: at most {limit} answers at once here, not {len(requests)}: as many as "
                                    "the server's --at-once and --queue together", param)
            for index, request in enumerate(requests):
                pending = self._admission.submit(request, self._caller, partial(deliver, index))
                self.choices.append(Choice(index, request, self._prepared, pending))
            yield events, disconnection
        finally:
            for choice in self.choices:
                self._admission.cancel(choice.pending)
            disconnection.cancel()
