"""The ASGI application: its routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flowspec_edge.d0.fair_queue import Caller
from flowspec_edge.serving.access_control import AccessMiddleware, caller_of
from flowspec_edge.serving.access_log import CLIENT_CLOSED_REQUEST, AccessRecord
from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.anthropic import requests as anthropic
from flowspec_edge.serving.anthropic.answers import MessageAnswer
from flowspec_edge.serving.dashboard.live import Live
from flowspec_edge.serving.dashboard.pages import page_routes
from flowspec_edge.serving.door import Door, Ready
from flowspec_edge.serving.intake import Intake, Work
from flowspec_edge.serving.metrics import Metrics
from flowspec_edge.serving.ollama import requests as ollama
from flowspec_edge.serving.ollama.answers import ChatAnswer, GenerateAnswer
from flowspec_edge.serving.ollama.model_card import ModelCard
from flowspec_edge.serving.openai.errors import ApiError, api_error
from flowspec_edge.serving.openai.handler import KEEP_ALIVE_S, ResponseHandler, StreamError
from flowspec_edge.serving.openai.prepare import PreparedRequest, ServedModel
from flowspec_edge.serving.openai.responses import list_object, model_object
from flowspec_edge.serving.openai.responses_endpoint import ResponseAnswer, ResponsesBody
from flowspec_edge.serving.openai.schemas import Body, ChatBody, CompletionBody, parsed, read_body

log = logging.getLogger(__name__)

# Headers that web pages may read.
_EXPOSED = ("x-request-id", "request-id", "x-flowspec-position", "x-flowspec-ignored", "retry-after")

# Paths that clients know from other servers, and what to tell them.
_NO_EMBEDDINGS = "embeddings are not served: the model here generates text"
_ONE_MODEL = "models are not managed over HTTP: the server has the one that it was started with"
_NOT_SERVED = {
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), _NO_EMBEDDINGS),
    **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), _ONE_MODEL),
    "/v1/messages/batches": "batches are not served: send the requests, which wait in the queue"}


def make_app(admission: Admission, served_model: ServedModel, api_key: str | None = None,
             keep_alive_s: float = KEEP_ALIVE_S, metrics: Metrics | None = None,
             live: Live | None = None, cors_origins: Sequence[str] = ()) -> Starlette:
    """Without ``api_key`` no key is needed; without ``live`` there is no page.

    ``keep_alive_s``: seconds without a token after which a stream sends a status line; ``cors_origins``: of web
    pages that may ask, or "*" for all.
    """
    target = served_model.model
    model_entry = model_object(served_model.name, int(time.time()), served_model.context_tokens, target.max_positions,
                               int(target.config["vocab_size"]), target.hidden_width)

    async def models(http: Request) -> Response:
        return JSONResponse(list_object([model_entry]))

    async def model(http: Request) -> Response:
        served_model.check_name(http.path_params["name"])
        return JSONResponse(model_entry)

    async def health(http: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(http: Request) -> Response:
        state = admission.readiness()
        age = None if state.token_age_s is None else round(state.token_age_s, 1)
        body = {"ready": state.ready, "reason": state.reason or None, "running": state.running,
                "waiting": state.waiting, "token_age_s": age}
        return JSONResponse(body, 200 if state.ready else 503)

    async def prometheus(http: Request) -> Response:
        assert metrics is not None
        text, kind = metrics.page(http.headers.get("accept", ""), admission.readiness())
        return Response(text, media_type=kind)

    intake = Intake()

    async def show(http: Request) -> Response:
        async with intake.body(http) as data:
            fields = parsed(data)
        ollama.model_name(served_model, fields.get("model") or fields.get("name"))
        return JSONResponse(card.show())

    shared = admission, intake, served_model, keep_alive_s, metrics
    card = ModelCard(served_model)
    endpoints = {
        "/v1/chat/completions": Door(partial(read_body, ChatBody)),
        "/v1/completions": Door(partial(read_body, CompletionBody)),
        "/v1/responses": Door(partial(read_body, ResponsesBody), ResponseAnswer),
        "/api/chat": Door(partial(ollama.read_chat, served_model), ChatAnswer, ollama.NAMES),
        "/api/generate": Door(partial(ollama.read_generate, served_model), GenerateAnswer, ollama.GENERATE_NAMES),
        "/v1/messages": Door(partial(anthropic.read_messages, served_model), MessageAnswer, anthropic.NAMES)}
    count_door = Door(partial(anthropic.read_counted, served_model), names=anthropic.NAMES)
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            *(Route(path, CompletionEndpoint(*shared, door), methods=["POST"]) for path, door in endpoints.items()),
            Route("/v1/messages/count_tokens", CountEndpoint(*shared, count_door), methods=["POST"]),
            Route("/api/version", partial(_json_response, card.version)),
            Route("/api/tags", partial(_json_response, card.tags)),
            Route("/api/ps", partial(_json_response, card.running)),
            Route("/api/show", show, methods=["POST"]),
            *(Route(path, partial(_not_served, explanation), methods=["GET", "POST", "DELETE"])
              for path, explanation in _NOT_SERVED.items()),
            Route("/health", health),
            Route("/ready", ready),
            *([Route("/metrics", prometheus)] if metrics else []),
            *([Route("/live", live), *page_routes()] if live else []),
        ],
        middleware=[*_cors(cors_origins), Middleware(AccessMiddleware, api_key=api_key)],
        exception_handlers={HTTPException: _http_error, ApiError: _error, Exception: _error},
    )
    app.router.redirect_slashes = False  # a redirect's target would come from the client's Host header
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Before the check of keys: a browser asks without one whether it may ask with one, and pages read errors, too."""
    if not origins:
        return []
    return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
                       allow_headers=["*"], expose_headers=[*_EXPOSED], max_age=600)]


class CompletionEndpoint:
    """An endpoint whose answers the model writes, as an ASGI application."""

    def __init__(self, admission: Admission, intake: Intake, served_model: ServedModel, keep_alive_s: float,
                 metrics: Metrics | None, door: Door) -> None:
        """Set up the endpoints; ``metrics`` gets the tokens as they come, and every finished request's record."""
        self._admission, self._intake, self._served = admission, intake, served_model
        self._door = door
        self._keep_alive_s = keep_alive_s
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, to_tell = AccessRecord(scope["path"]), True
        try:
            to_tell = await self._serve(record, scope, receive, send)
        except ClientDisconnect:
            record.status = CLIENT_CLOSED_REQUEST
        except StreamError as stream_error:
            record.status, record.error = stream_error.error.status, str(stream_error)
        except Exception as error:
            failure = api_error(error)
            if failure.status == 500 and failure is not error:
                log.error("a fault of this program", exc_info=error)
            failure = self._door.with_own_names(failure)
            record.status, record.error = failure.status, str(failure)
            await failure.response(record.path)(scope, receive, send)
        finally:
            if to_tell:
                record.write()
                if self._metrics:
                    self._metrics.request_ended(record)

    async def _serve(self, record: AccessRecord, scope: Scope, receive: Receive, send: Send) -> bool:
        """Return whether the model was asked.

        Else the request is not logged: only requests that the pipeline answers are bounded, so others could fill
        the disk.
        """
        http = Request(scope, receive)
        async with self._intake.body(http) as data:
            body = await self._intake.run("body", caller_of(scope, None), lambda: self._door.read(data), receive)
            if isinstance(body, Ready):
                await JSONResponse(body.content)(scope, receive, send)
                return False
            caller = caller_of(scope, body.user)
            work: Work = "template" if isinstance(body, ChatBody) else "text"
            prepared = await self._intake.run(work, caller, lambda: self._served.prepared(body), receive)
        record.prompt_tokens = prepared.prompt_tokens
        return await self._respond(record, body, prepared, caller, scope, receive, send)

    async def _respond(self, record: AccessRecord, body: Body, prepared: PreparedRequest, caller: Caller,
                       scope: Scope, receive: Receive, send: Send) -> bool:
        if prepared.grammar is not None:
            work: Work = "text" if self._served.is_quick(prepared) else "grammar"
            prepared = await self._intake.run(work, caller, lambda: self._served.compiled(prepared), receive)
        record.stream = bool(body.stream)
        answer = self._door.answer(body, prepared)
        record.id, record.strategy = answer.id, prepared.request.strategy

        def arrived(count: int) -> None:
            is_first = record.first_token_s is None
            gaps = record.add_tokens(time.monotonic(), count)
            if self._metrics:
                self._metrics.tokens_arrived(count, record.first_token_s if is_first else None, gaps)

        handler = ResponseHandler(self._admission, prepared, answer, caller, self._keep_alive_s, arrived)
        try:
            if body.stream:
                await handler.stream(receive, send)
            else:
                await handler.complete(scope, receive, send)
        finally:
            record.completion_tokens, record.energy_j = handler.completion_tokens, handler.energy_j
            first = handler.choices[0] if handler.choices else None
            record.finish = first.finish if first else None
            record.queued_s = first.pending.waited_s if first else None
        return True


class CountEndpoint(CompletionEndpoint):
    """Tells how many tokens a prompt has."""

    async def _respond(self, record: AccessRecord, body: Body, prepared: PreparedRequest, caller: Caller,
                       scope: Scope, receive: Receive, send: Send) -> bool:
        await JSONResponse({"input_tokens": prepared.prompt_tokens})(scope, receive, send)
        return False


async def _json_response(content: Callable[[], dict[str, Any]], http: Request) -> Response:
    return JSONResponse(content())


async def _not_served(explanation: str, http: Request) -> Response:
    raise ApiError(404, f"{http.scope['path']}: {explanation}", code="unsupported_endpoint")


async def _http_error(http: Request, error: Exception) -> Response:
    """Convert Starlette's errors (404, 405) to OpenAI's format."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.scope['path']}: {error.detail.lower()}"
    response = ApiError(error.status_code, message).response(http.scope["path"])
    response.headers.update(error.headers or {})
    return response


async def _error(http: Request, error: Exception) -> Response:
    return api_error(error).response(http.scope["path"])
