"""What clients send: the fields of OpenAI's request bodies that are read here.

Knows types, ranges, and which of OpenAI's features this server does not have: they are refused where
ignoring them would change the answer.  Fields that nobody here knows are ignored, as clients send many.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flowspec_edge.serving.errors import ApiError, invalid

_MOST_STOPS = 4
_MOST_LIKELY = 20  # tokens beside each; OpenAI's limit for chats
# Field -> the values that ask for nothing.
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],),
    "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
}


class _Ignoring(BaseModel):
    """Values are of the type that is written, or an error; unknown fields are nobody's business."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def _stops(value: Any) -> Any:
    stops: Any = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a string, or a list of strings that are not empty")
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"at most {_MOST_STOPS} stop strings, not {len(stops)}")
    return stops


def _text(value: Any) -> Any:
    """A message's content: a string, or parts of type text."""
    if value is None or isinstance(value, str):
        return value or ""
    parts: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
               for part in parts):
        raise ValueError('must be a string, or parts of {"type": "text"}: this server reads text only')
    return "".join(part["text"] for part in parts)


def _prompt(value: Any) -> Any:
    """A completion's prompt: one text, or the token ids of one."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    if not isinstance(value, str) and not ids:
        raise ValueError("must be one string, or the token ids of one; send one request for each prompt")
    return value


def _count(value: Any) -> Any:
    """Some clients say false for none."""
    return None if value is False else value


class StreamOptions(_Ignoring):
    """How a stream ends."""

    include_usage: bool | None = None


class Extensions(_Ignoring):
    """What only this server has, under "flowspec": nobody else's fields can be meant."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    strategy: str | None = None
    tokens: bool = False  # the answer's last object says which tokens it is made of, and the run's figures


class ChatMessage(_Ignoring):
    """A turn; "developer" is what newer clients call "system"."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)] = ""

    @model_validator(mode="before")
    @classmethod
    def _says_something(cls, turn: Any) -> Any:
        """Only an assistant's turn may be without content: it may have called a tool."""
        if isinstance(turn, dict) and turn.get("content") is None and turn.get("role") != "assistant":
            raise ValueError("needs content: a string, or text parts")
        return turn


class Body(_Ignoring):
    """What both endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    user: str | None = None
    flowspec: Extensions = Extensions()

    @property
    def limit(self) -> int | None:
        """The most tokens that are wanted."""
        return self.max_tokens

    @property
    def likelihoods(self) -> int | None:
        """How many of the likeliest tokens are wanted beside each one's own probability; None: not even
        that."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LIKELY)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likelihoods(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    logprobs: Annotated[int | None, Field(ge=0, le=_MOST_LIKELY), BeforeValidator(_count)] = None

    @property
    def likelihoods(self) -> int | None:
        return self.logprobs


B = TypeVar("B", bound=Body)


def read_body(kind: type[B], data: bytes) -> B:
    """The body, or an ApiError with the field that is wrong or not supported."""
    try:
        fields = json.loads(data, parse_constant=_no_constant)
        if b"\\u" in data:  # JSON can spell half a surrogate pair, which is no text
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, "the body has a \\u escape that is no character") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, neutral in _NOT_HERE.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            advice = f", or send {json.dumps(neutral[0])}" if neutral else ""
            raise ApiError(400, f"{name} is not supported by this server: leave it out{advice}", name,
                           "unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from error


def _no_constant(name: str) -> None:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no JSON")
