"""Request bodies of OpenAI's API, and fields of vLLM, SGLang and llama.cpp's server; :mod:`.fields` lists all."""

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
    PrivateAttr,
    ValidationError,
    model_validator,
)

from flowspec_edge.serving.openai.errors import ApiError, invalid
from flowspec_edge.serving.openai.field_table import Endpoint
from flowspec_edge.serving.openai.fields import TABLE

_MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 1000  # of one
_MAX_STOPS_CHARACTERS = 4000  # of all together: each token is compared with them
_MAX_WORDS = 256
_MAX_TOP_LOGPROBS = 20  # OpenAI's limit for chats
_MAX_CHOICES = 8
_MAX_PROMPTS = 64
_MAX_BIASES = 1024
_MAX_IDS = 300_000  # of tokens, a large vocabulary
MAX_TOOLS = 128  # OpenAI's limit
_OTHER_TYPES = ("string", "number", "integer", "boolean", "array", "null")  # than object, of JSON schemas
_MOST_URGENT, _LEAST_URGENT = -10, 10  # priorities: 30 s of waiting make up for a step


class Ignoring(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def _whole_number(value: Any) -> Any:
    """JSON has one kind of number, so some clients write 8 as 8.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole_number)]
TokenIds = Annotated[list[Whole], Field(max_length=_MAX_IDS)]


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
    if (together := sum(map(len, stops))) > _MAX_STOPS_CHARACTERS:
        raise ValueError(f"at most {_MAX_STOPS_CHARACTERS} characters of all stop strings, not {together}")
    return stops


def _text(value: Any) -> Any:
    """Return a message's content: a string, or parts of type text."""
    if value is None or isinstance(value, str):
        return value or ""
    parts: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
               for part in parts):
        raise ValueError('must be a string, or parts of {"type": "text"}: this server reads text only')
    return "".join(part["text"] for part in parts)


def _prompts(value: Any) -> Any:
    """Return a completion's prompts: one alone is a list of one."""
    alone = isinstance(value, str) or (isinstance(value, list) and any(map(_is_id, value)))
    prompts = [value] if alone else value
    if isinstance(prompts, list):
        prompts = [[*map(_whole_number, prompt)] if isinstance(prompt, list) else prompt for prompt in prompts]
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if len(prompts) > _MAX_PROMPTS:
        raise ValueError(f"at most {_MAX_PROMPTS} prompts a request, not {len(prompts)}")
    return prompts


def _is_id(value: Any) -> bool:
    return type(_whole_number(value)) is int


def _is_prompt(value: Any) -> bool:
    ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    return isinstance(value, str) or bool(ids)


def _bias(value: Any) -> Any:
    """JSON writes token ids, which are keys, as strings; llama.cpp takes a list of pairs, too."""
    if value is None:
        return None
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 and _is_id(pair[0])
                                            for pair in value)
    if pairs:
        value = {str(_whole_number(token)): bias for token, bias in value}
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,9}", key) for key in value):
        raise ValueError('must be an object of token ids and numbers, {"42": -100}')
    if len(value) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} tokens, not {len(value)}")
    return {int(key): bias for key, bias in value.items()}


def _count(value: Any) -> Any:
    """Read a count as some clients send it: false for none, and true, which other servers read as 1."""
    return None if value is False else 1 if value is True else _whole_number(value)


def _flag(value: Any) -> Any:
    """Read a flag as some clients send it, in the form of completions: 1 is a chat's true."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def _or_empty(value: Any) -> Any:
    return {} if value is None else value


class StreamOptions(Ignoring):
    include_usage: bool | None = None


class Extensions(Ignoring):
    """The server's own fields, under "flowspec"; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    strategy: str | None = None
    tokens: bool = False  # whether the answer's last object has its token ids and the run's statistics


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(Ignoring):
    """The field ``reasoning`` of responses; some servers take it in chats, too.

    A client may ask for a ``summary``, but gets none.
    """

    effort: ReasoningEffort | None = None


class JsonSchema(Ignoring):
    """A JSON schema under a name; ``schema`` is a method's name in pydantic.

    A misspelt ``schema`` would let any object pass, so an unknown field is an error.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str | None = None
    description: str | None = None
    content: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(JsonSchema):
    """Its own schema, without a level of nesting, is what responses, llama.cpp's server and others take."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.content is None:
            raise ValueError('the type json_schema needs "json_schema": {"name": …, "schema": {…}}')
        if self.type == "text" and (self.json_schema is not None or self.content is not None):
            raise ValueError("the type text has no schema: use json_schema")
        return self

    @property
    def schema_settings(self) -> JsonSchema:
        return self.json_schema or self


class StructuredOutputs(Ignoring):
    """vLLM's; an unknown field is an error. ``content``: a schema, as an object or as text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    content: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # there is one way to enforce a grammar
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


class FunctionDefinition(Ignoring):
    """A function that a model may call; ``parameters``: None: the function has none."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> FunctionDefinition:
        """Return a type that is none is ignored unless the function is strict, as elsewhere in its schema."""
        kind = (self.parameters or {}).get("type", "object")
        kinds = kind if isinstance(kind, list) else [kind]
        if "object" not in kinds and (self.strict or any(name in _OTHER_TYPES for name in kinds)):
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


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def _arguments(value: Any) -> Any:
    """Read arguments as some clients send them: the object itself, and null for none."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value or ""


class _CalledFunction(Ignoring):
    name: str
    arguments: Annotated[str, BeforeValidator(_arguments)] = ""

    @property
    def parsed(self) -> dict[str, Any] | str:
        """The arguments; their text if that is no JSON object, since max_tokens may have cut it."""
        try:
            parsed = json.loads(self.arguments or "{}", parse_constant=_no_number)
        except (ValueError, RecursionError):
            return self.arguments
        return parsed if isinstance(parsed, dict) else self.arguments


def _no_number(name: str) -> None:
    raise ValueError(name)


class CalledTool(Ignoring):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: _CalledFunction


class ChatMessage(Ignoring):
    """A turn; newer clients send "developer" instead of "system".

    ``reasoning`` and ``reasoning_content`` are two names of an assistant's reasoning.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_complete(cls, turn: Any) -> Any:
        """Return an assistant's turn may lack content, since it may have called a tool, and a tool may return none.

        What other servers read, and would change the prompt, is refused.
        """
        if not isinstance(turn, dict):
            return turn
        if turn.get("content") is None and turn.get("role") not in ("assistant", "tool"):
            raise ValueError("needs content: a string, or text parts")
        for name, instead in _REFUSED_IN_MESSAGES.items():
            if turn.get(name):
                raise ValueError(f"{name} is not supported: {instead}")
        return turn


_REFUSED_IN_MESSAGES = {
    "prefix": "use continue_final_message", "partial": "use continue_final_message",
    "function_call": "use tool_calls", "audio": "this server reads text only",
    "images": "this server reads text only", "tools": "send tools beside messages"}


class Body(Ignoring):
    """The fields of all endpoints.

    endpoint     which fields it has
    format_name  the field of :attr:`answer_format`
    """

    endpoint: ClassVar[Endpoint]
    format_name: ClassVar[str] = "response_format"

    _ignored: tuple[str, ...] = PrivateAttr(default=())
    _cut_to_room: bool = PrivateAttr(default=False)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]] | None,
                          BeforeValidator(_bias)] = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS)]],
                         Field(max_length=_MAX_WORDS)] | None = None
    n: Annotated[Whole, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    user: str | None = None
    priority: Annotated[Whole, AfterValidator(_priority)] | None = None
    strategy: str | None = None
    flowspec: Annotated[Extensions, BeforeValidator(_or_empty)] = Extensions()

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of its fields that no server documents, which have no effect."""
        return self._ignored

    @property
    def cut_to_room(self) -> bool:
        """Whether a limit that the context has no room for is cut to it, and no error."""
        return self._cut_to_room

    @property
    def keeps_stop(self) -> bool:
        """Whether the answer has the stop string, or the text of the stop token."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

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

    endpoint: ClassVar[Endpoint] = "chat"
    messages_name: ClassVar[str] = "messages"  # for clients

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: Annotated[bool | None, BeforeValidator(_flag)] = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None

    @property
    def splits_reasoning(self) -> bool:
        """Whether the answer has its reasoning apart from its content."""
        return self.separate_reasoning is not False and self.reasoning_format != "none"

    @property
    def effort(self) -> ReasoningEffort | None:
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

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
    """Read the body of POST /v1/completions. With ``short`` an answer without a limit has 16 tokens, as OpenAI's."""

    endpoint: ClassVar[Endpoint] = "completions"
    short: ClassVar[bool] = True

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    add_special_tokens: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=_MAX_TOP_LOGPROBS), BeforeValidator(_count)] = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None

    @property
    def likelihoods(self) -> int | None:
        if self.top_logprobs and self.logprobs is None:
            raise ApiError(400, "top_logprobs goes with logprobs", "top_logprobs")
        return self.logprobs if self.top_logprobs is None else self.top_logprobs


B = TypeVar("B", bound=Body)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_body(kind: type[B], data: bytes) -> B:
    """Parse a body; ApiError names a field that is invalid or not supported."""
    fields = parsed(data)
    return body_of(kind, fields, TABLE.ignored(kind.endpoint, fields))


def body_of(kind: type[B], fields: dict[str, Any], ignored: Sequence[str], cut_to_room: bool = False) -> B:
    """Validate a body's fields; ApiError names one that is invalid.

    ignored      names that have no effect
    cut_to_room  as the body's property
    """
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from error
    body._ignored, body._cut_to_room = tuple(ignored), cut_to_room
    return body


def parsed(data: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    ApiError also for what Python's parser accepts although it is no JSON or no text: encodings other than UTF-8,
    surrogates, NaN.
    """
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
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return fields


def _no_constant(name: str) -> None:
    """Reject NaN and Infinity."""
    raise ApiError(400, f"the body is not valid JSON: {name} is no JSON")
