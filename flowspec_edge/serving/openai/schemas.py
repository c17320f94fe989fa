"""Request bodies of OpenAI's API.

Unsupported features are refused if ignoring them would change the answer; unknown fields are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from flowspec_edge.serving.openai.errors import ApiError, invalid

_MAX_STOPS = 4
_MAX_STOP_CHARACTERS = 1000
_MAX_TOP_LOGPROBS = 20  # OpenAI's limit for chats
_MAX_CHOICES = 8
_MAX_PROMPTS = 64
_MAX_BIASES = 1024
_MAX_TOOLS = 128  # OpenAI's limit
_OTHER_TYPES = ("string", "number", "integer", "boolean", "array", "null")  # than object, of JSON schemas
_MOST_URGENT, _LEAST_URGENT = -10, 10  # priorities: 30 s of waiting make up for a step


class Ignoring(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def _priority(value: int) -> int:
    if not _MOST_URGENT <= value <= _LEAST_URGENT:
        raise ValueError(f"must be from {_MOST_URGENT} to {_LEAST_URGENT}")
    return value


def _stops(value: Any) -> Any:
    stops: Any = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a string, or a list of strings that are not empty")
    if len(stops) > _MAX_STOPS:
        raise ValueError(f"at most {_MAX_STOPS} stop strings, not {len(stops)}")
    if (longest := max(map(len, stops), default=0)) > _MAX_STOP_CHARACTERS:
        raise ValueError(f"at most {_MAX_STOP_CHARACTERS} characters a stop string, not {longest}")
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


def _prompts(value: Any) -> Any:
    """A completion's prompts: one alone is a list of one."""
    alone = isinstance(value, str) or (isinstance(value, list) and any(type(item) is int for item in value))
    prompts = [value] if alone else value
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if len(prompts) > _MAX_PROMPTS:
        raise ValueError(f"at most {_MAX_PROMPTS} prompts a request, not {len(prompts)}")
    return prompts


def _is_prompt(value: Any) -> bool:
    ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    return isinstance(value, str) or bool(ids)


def _bias(value: Any) -> Any:
    """JSON writes token ids, which are keys, as strings."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,9}", key) for key in value):
        raise ValueError('must be an object of token ids and numbers, {"42": -100}')
    if len(value) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} tokens, not {len(value)}")
    return {int(key): bias for key, bias in value.items()}


def _count(value: Any) -> Any:
    """Some clients send false for none."""
    return None if value is False else value


class StreamOptions(Ignoring):
    include_usage: bool | None = None


class Extensions(Ignoring):
    """This server's own fields, under "flowspec"; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    strategy: str | None = None
    tokens: bool = False  # whether the answer's last object has its token ids and the run's statistics


class JsonSchema(Ignoring):
    """``schema`` is a method's name in pydantic."""

    content: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(Ignoring):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('the type json_schema needs "json_schema": {"name": …, "schema": {…}}')
        return self


class FunctionDefinition(Ignoring):
    """``parameters``: None: the function has none."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> FunctionDefinition:
        """A type that is none is ignored unless the function is strict, as elsewhere in its schema."""
        kind = (self.parameters or {}).get("type", "object")
        kinds = kind if isinstance(kind, list) else [kind]
        if "object" not in kinds and (self.strict or any(one in _OTHER_TYPES for one in kinds)):
            raise ValueError("parameters: must be a JSON schema of the type object")
        return self


class ToolDefinition(Ignoring):
    type: Literal["function"]
    function: FunctionDefinition


class _Named(Ignoring):
    name: str


class NamedTool(Ignoring):
    """A choice of one tool."""

    type: Literal["function"]
    function: _Named


class _CalledFunction(Ignoring):
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """ValueError if the arguments are no JSON object."""
        parsed = json.loads(self.arguments or "{}", parse_constant=_no_constant)
        if not isinstance(parsed, dict):
            raise ValueError
        return parsed

    @model_validator(mode="after")
    def _is_json(self) -> _CalledFunction:
        try:
            _ = self.parsed
        except (ValueError, RecursionError):
            raise ValueError("arguments: must be the text of a JSON object") from None
        return self


class CalledTool(Ignoring):
    """A tool call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class ChatMessage(Ignoring):
    """A turn; newer clients send "developer" instead of "system"."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, turn: Any) -> Any:
        """Only an assistant's turn may lack content: it may have called a tool."""
        if isinstance(turn, dict) and turn.get("content") is None and turn.get("role") != "assistant":
            raise ValueError("needs content: a string, or text parts")
        return turn


class Body(Ignoring):
    """The fields of all endpoints.

    unsupported  field -> accepted values, which ask for nothing
    reasons      what the error says of some of these
    format_name  the field of :attr:`answer_format`
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,), "echo": (False,), "suffix": ("",), "functions": ([],),
        "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (), "prediction": (),
    }
    reasons: ClassVar[dict[str, str]] = {"echo": "it returns no prompts and no log-probabilities of them"}
    format_name: ClassVar[str] = "response_format"

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]] | None,
                          BeforeValidator(_bias)] = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    response_format: ResponseFormat | None = None
    user: str | None = None
    priority: Annotated[int, AfterValidator(_priority)] | None = None
    flowspec: Extensions = Extensions()

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def answer_format(self) -> ResponseFormat | None:
        return self.response_format

    @property
    def likelihoods(self) -> int | None:
        """Number of alternatives per token; None: no log-probabilities."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages_name: ClassVar[str] = "messages"  # for clients

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None

    @property
    def turns(self) -> Sequence[ChatMessage]:
        return self.messages

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _has_the_tool(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools or ()]
        if len({*names}) < len(names):
            raise ValueError("tools: two functions have the same name")
        choice = self.tool_choice
        if choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool {choice.function.name!r}")
        return self

    @property
    def likelihoods(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int | None, Field(ge=0, le=_MAX_TOP_LOGPROBS), BeforeValidator(_count)] = None

    @property
    def likelihoods(self) -> int | None:
        return self.logprobs


B = TypeVar("B", bound=Body)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_body(kind: type[B], data: bytes) -> B:
    """Parse a body; ApiError names a field that is invalid or not supported."""
    fields = _parsed(data)
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, neutral in kind.unsupported.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            advice = f", or send {json.dumps(neutral[0])}" if neutral else ""
            reason = f" ({kind.reasons[name]})" if name in kind.reasons else ""
            raise ApiError(400, f"{name} is not supported by this server{reason}: leave it out{advice}", name,
                           "unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from error


def _parsed(data: bytes) -> Any:
    """ApiError also for what Python's parser accepts although it is no JSON or no text: encodings other than
    UTF-8, surrogates, NaN."""
    try:
        text = data.decode("utf-8-sig")
        fields = json.loads(text, parse_constant=_no_constant)
        if _SURROGATE.search(text):  # a pair of escapes is one character, and half a pair is none
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not valid JSON: it is not UTF-8 text") from error
    except UnicodeEncodeError as error:
        raise ApiError(400, "the body has a \\u escape that is no character") from error
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    except ValueError as error:  # Python limits the digits of integers
        raise ApiError(400, "the body has a number with too many digits") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    return fields


def _no_constant(name: str) -> None:
    """Reject NaN and Infinity."""
    raise ApiError(400, f"the body is not valid JSON: {name} is no JSON")
