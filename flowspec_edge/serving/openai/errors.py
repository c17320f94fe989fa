"""Errors: an HTTP status and an error object, in the format of the API whose path was asked."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from flowspec_edge.errors import FlowspecError, RequestFailed, UsageError
from flowspec_edge.model.untrusted.processes import ProcessesUnavailable
from flowspec_edge.serving.admission import ClusterUnavailable, QueueFull

_TYPES = {429: "rate_limit_error"}
_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
_OLLAMA, _ANTHROPIC = "/api/", "/v1/messages"  # beginnings of paths
_MAX_QUOTED = 500  # characters of a message or a field's name: they may quote the client, and are logged


class ApiError(FlowspecError):
    """An error response: HTTP status, message, the invalid field, OpenAI's code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None) -> None:
        super().__init__(_cut(message))
        self.status, self.code, self.retry_after = status, code, retry_after
        self.param = None if param is None else _cut(param)

    @property
    def body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": _TYPES.get(self.status, other),
                          "param": self.param, "code": self.code}}

    @property
    def ollama_body(self) -> dict[str, Any]:
        return {"error": str(self)}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "api_error"
        return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(self.status, other),
                                           "message": str(self)}}

    def response(self, path: str = "") -> JSONResponse:
        """Make the response to a request of ``path``."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = (self.ollama_body if path.startswith(_OLLAMA) else
                self.anthropic_body if path.startswith(_ANTHROPIC) else self.body)
        return JSONResponse(body, self.status, headers)


def api_error(error: Exception) -> ApiError:
    """Convert any error to a response; unexpected ones show clients no details."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
        case ProcessesUnavailable():
            return ApiError(503, str(error), code="overloaded", retry_after=error.retry_after)
        case ClusterUnavailable():
            return ApiError(503, str(error), code="cluster_unavailable", retry_after=error.retry_after)
        case UsageError():
            return ApiError(400, str(error))
        case RequestFailed():
            return ApiError(500, str(error))
        case _:
            return ApiError(500, "internal error; the server's log says more")


def invalid(error: ValidationError) -> ApiError:
    """Return the first validation error of a body, with the field's path."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field_path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{field_path}: {message}" if field_path else message, field_path or None)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
