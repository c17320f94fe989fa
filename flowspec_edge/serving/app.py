"""The routes: OpenAI's endpoints, /health, /ready, /metrics, /live and the page, and who may use them.

Knows paths, the API key and what a request must look like to be read at all.  Does not know models.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flowspec_edge.serving.answers import Answer, model_object
from flowspec_edge.serving.asking import Asked, Served
from flowspec_edge.serving.bodies import B, ChatBody, CompletionBody, read_body
from flowspec_edge.serving.desk import Desk
from flowspec_edge.serving.errors import ApiError, api_error
from flowspec_edge.serving.live import Live
from flowspec_edge.serving.log import GONE, Record
from flowspec_edge.serving.metrics import Metrics
from flowspec_edge.serving.pages import is_page, page_routes
from flowspec_edge.serving.reply import KEEP_ALIVE_S, ClientGone, Reply, Told

log = logging.getLogger(__name__)

MOST_BYTES = 2 * 2**20  # of a body: a prompt of that size fits into no model served here


def make_app(desk: Desk, served: Served, api_key: str | None = None,
             keep_alive_s: float = KEEP_ALIVE_S, metrics: Metrics | None = None,
             live: Live | None = None) -> Starlette:
    """The ASGI application; without a key everybody is let in, without ``live`` there is no page.

    ``keep_alive_s``: seconds without a token after which a stream says why.  ``metrics`` are told of
    every request and shown at /metrics.
    """
    created = int(time.time())

    async def models(http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_object(served.name, created)]})

    async def model(http: Request) -> Response:
        name = http.path_params["name"]
        if name != served.name:
            raise ApiError(404, f"the model {name!r} does not exist here; there is {served.name!r}", "model",
                           "model_not_found")
        return JSONResponse(model_object(served.name, created))

    async def health(http: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(http: Request) -> Response:
        state = desk.readiness()
        age = None if state.token_age_s is None else round(state.token_age_s, 1)
        body = {"ready": state.ready, "reason": state.reason or None, "running": state.running,
                "waiting": state.waiting, "token_age_s": age}
        return JSONResponse(body, 200 if state.ready else 503)

    async def numbers(http: Request) -> Response:
        assert metrics is not None
        text, kind = metrics.page(http.headers.get("accept", ""), desk.readiness())
        return Response(text, media_type=kind)

    over = metrics.over if metrics else lambda record: None
    chat = Endpoint(desk, served.name, ChatBody, served.chat, keep_alive_s, over)
    completion = Endpoint(desk, served.name, CompletionBody, served.completion, keep_alive_s, over)
    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/health", health),
            Route("/ready", ready),
            *([Route("/metrics", numbers)] if metrics else []),
            *([Route("/live", live), *page_routes()] if live else []),
        ],
        middleware=[Middleware(Gate, api_key=api_key)],
        exception_handlers={HTTPException: _http_error, ApiError: _told, Exception: _told},
    )


class Gate:
    """Lets in who has the key; /health is open to all, and the page, which asks for the key.

    Without a key only this machine can reach the server; that includes a browser on it, in which a
    foreign page's name may be made to resolve to loopback.  So the name must be one of loopback's own.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        refused = None
        if scope["type"] == "http" and scope["path"] != "/health":
            refused = self._refusal(Request(scope))
        await (refused.response() if refused else self._app)(scope, receive, send)

    def _refusal(self, http: Request) -> ApiError | None:
        if self._expected is None:
            if _is_loopback(http.url.hostname or ""):
                return None
            return ApiError(403, f"without an API key this server answers to localhost and 127.0.0.1 only, "
                                 f"not to {http.url.hostname}")
        if is_page(http.url.path):
            return None
        given = http.headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, self._expected):
            return None
        says = "incorrect API key" if given else "no API key: send it as the header Authorization: Bearer KEY"
        return ApiError(401, says, code="invalid_api_key")


class Endpoint:
    """One of OpenAI's endpoints, as an ASGI application."""

    def __init__(self, desk: Desk, name: str, kind: type[B], ask: Callable[[B], Asked],
                 keep_alive_s: float, over: Callable[[Record], None]) -> None:
        """``kind``: its bodies; ``ask``: what such a body asks of the cluster; ``over``: is told of every
        request when it is over."""
        self._desk, self._name = desk, name
        self._read: Callable[[bytes], Any] = lambda data: read_body(kind, data)
        self._ask: Callable[[Any], Asked] = ask
        self._chat = kind is ChatBody
        self._keep_alive_s = keep_alive_s
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and write the request's line in the log."""
        record = Record(scope["path"])
        try:
            await self._serve(record, scope, receive, send)
        except (ClientGone, ClientDisconnect):
            record.status = GONE
        except Told as told:
            record.status, record.error = told.error.status, str(told)
        except Exception as error:
            failure = api_error(error)
            record.status, record.error = failure.status, str(failure)
            if failure.status == 500:
                log.error("a fault of this program", exc_info=error)
            await failure.response()(scope, receive, send)
        finally:
            record.write()
            self._over(record)

    async def _serve(self, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        body = self._read(await _body(http))
        record.stream = bool(body.stream)
        asked = self._ask(body)
        answer = Answer(self._chat, self._name, asked.request, body.include_usage)
        record.id, record.strategy = answer.id, asked.request.strategy
        record.prompt_tokens = len(asked.request.prompt)
        caller = body.user or (http.client.host if http.client else "")
        reply = Reply(self._desk, asked, answer, caller, self._keep_alive_s)
        try:
            if body.stream:
                await reply.stream(receive, send)
            else:
                await reply.whole(scope, receive, send)
        finally:
            record.completion_tokens, record.finish = asked.reader.tokens, reply.finish
            record.queued_s = reply.ticket.waited_s if reply.ticket else None
            record.came(reply.tokens)


def _is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _body(http: Request) -> bytes:
    """The request's body.  JSON only: a foreign web page cannot send that unasked."""
    if http.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "send the body as JSON, with the header Content-Type: application/json")
    data = bytearray()
    async for chunk in http.stream():
        data += chunk
        if len(data) > MOST_BYTES:
            raise ApiError(413, f"the body is larger than {MOST_BYTES} bytes")
    return bytes(data)


async def _http_error(http: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    says = f"{http.method} {http.url.path}: {error.detail.lower()}"
    response = ApiError(error.status_code, says).response()
    response.headers.update(error.headers or {})
    return response


async def _told(http: Request, error: Exception) -> Response:
    return api_error(error).response()
