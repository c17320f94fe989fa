"""Errors in the shape that OpenAI's clients read.

Knows status codes and the error object.  Does not know what went wrong.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.serving.desk import Full, Unavailable

_TYPES = {429: "rate_limit_error"}


class ApiError(FlowspecError):
    """A refusal: HTTP status, text, the field that is to blame, OpenAI's code for it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": _TYPES.get(self.status, other),
                          "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The same, as an answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def api_error(error: Exception) -> ApiError:
    """What a client is told of any error; nothing of one that nobody foresaw."""
    match error:
        case ApiError():
            return error
        case Full():
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
        case Unavailable():
            return ApiError(503, str(error), code="cluster_unavailable", retry_after=error.retry_after)
        case UsageError():
            return ApiError(400, str(error))
        case _:
            return ApiError(500, "internal error; the server's log says more")


def invalid(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, with its place in it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    says = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{place}: {says}" if place else says, place or None)
