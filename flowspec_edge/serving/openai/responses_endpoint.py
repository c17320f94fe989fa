"""OpenAI's Responses API, for text and function calls.

A body is a chat's under other names, and so is the answer, whose output is a list of items: reasoning, messages and
calls. The server stores nothing, so a conversation is always in the request's ``input``.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from flowspec_edge.d0.request import Result
from flowspec_edge.serving.openai.detokenize import CallPiece
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.field_table import Endpoint
from flowspec_edge.serving.openai.prepare import PreparedRequest
from flowspec_edge.serving.openai.responses import Answer, AnswerPiece, Finish, TokenLogprob
from flowspec_edge.serving.openai.schemas import (
    MAX_TOOLS,
    ChatBody,
    ChatMessage,
    Ignoring,
    NamedTool,
    ResponseFormat,
    ToolChoice,
    ToolDefinition,
    Whole,
)


def _messages(value: Any) -> Any:
    """Read ``input`` as a chat's messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    turns: list[Any] = []
    for item in value:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "function_call":
            _add_call(turns, item)
        elif kind == "function_call_output":
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"),
                          "content": _texts(item.get("output"))})
        elif kind == "message":
            turn = {"role": item.get("role"), "content": _texts(item.get("content"))}
            reasoning = turns.pop() if turn["role"] == "assistant" and _only_thought(turns) else {}
            turns.append({**reasoning, **turn})
        elif kind == "reasoning":
            turns.append({"role": "assistant", "content": None, "reasoning_content": _thought(item)})
        else:
            raise ValueError('must be a string, or messages {"role": …, "content": …}, function_call and '
                             "function_call_output: text is all that this server reads")
    return turns


def _only_thought(turns: list[Any]) -> bool:
    """Whether the last turn is the reasoning of one that is still to come."""
    return bool(turns) and turns[-1].keys() == {"role", "content", "reasoning_content"}


def _thought(item: dict[str, Any]) -> Any:
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str)
                                              for part in parts):
        raise ValueError('the content of reasoning must be parts of {"type": "reasoning_text"}')
    return "".join(part["text"] for part in parts)


def _add_call(turns: list[Any], item: dict[str, Any]) -> None:
    """Add a call to the assistant's turn: a turn's text and its calls are items of their own."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": None})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    turns[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})


def _texts(content: Any) -> Any:
    """Parts of an item's content under the names that chats give them."""
    if not isinstance(content, list):
        return content
    return [{**part, "type": "text"} if isinstance(part, dict)
            and part.get("type") in ("input_text", "output_text") else part for part in content]


def _tool(tool: Any) -> Any:
    """Return a function, whose fields chats have one level deeper."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


def _tools(value: Any) -> Any:
    return [_tool(tool) for tool in value] if isinstance(value, list) else value


class TextOptions(Ignoring):
    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None  # OpenAI's default; the model was not trained to others


def _included(value: Any) -> Any:
    """Return what a response may include; it has no reasoning, sources or images of its own to include."""
    if value == "message.output_text.logprobs":
        raise ValueError("log-probabilities are not in responses: /v1/chat/completions has logprobs")
    return value


# What clients ask for whether or not a response has it, such as LiteLLM's adapter of Anthropic's API.
Included = Annotated[Literal[
    "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results"], BeforeValidator(_included)]


class ResponsesBody(ChatBody):
    """POST /v1/responses."""

    endpoint: ClassVar[Endpoint] = "responses"
    format_name: ClassVar[str] = "text.format"
    messages_name: ClassVar[str] = "input"

    messages: Annotated[list[ChatMessage], BeforeValidator(_messages), Field(min_length=1, alias="input")]
    tools: Annotated[Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None,
                     BeforeValidator(_tools)] = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_tool)] = None
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    include: list[Included] | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None

    @property
    def turns(self) -> Sequence[ChatMessage]:
        system = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        return [*system, *self.messages]

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def answer_format(self) -> ResponseFormat | None:
        return self.text.format if self.text else None

    @property
    def likelihoods(self) -> int | None:
        return None


class ResponseAnswer(Answer):
    """Messages and calls, in the order in which they are written: as an object, or as typed events."""

    end = b""

    def __init__(self, body: ResponsesBody, prepared: PreparedRequest) -> None:
        super().__init__(body, prepared)
        self._body = body
        self.id = f"resp_{uuid.uuid4().hex}"
        self._numbers = count()  # of events
        self._output: list[dict[str, Any]] = []  # the items, of which the last may be open
        self._open = False
        self._finish: Finish | None = None
        self._details: dict[str, Any] = {}

    def complete(self, choices: list[dict[str, Any]], usage: dict[str, Any], figures: dict[str, Any],
                 extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._response(self._status, self._output, usage) | {"flowspec": figures | (extra or {})}

    def choice(self, index: int, pieces: Sequence[AnswerPiece], finish: Finish | None,
               logprobs: Sequence[TokenLogprob] = (), extra: dict[str, Any] | None = None,
               stop: str | None = None) -> dict[str, Any]:
        self.pieces(index, pieces)
        self.closing(index, finish or "stop")
        return {}  # the only one, whose items are the response's output

    def encoded(self, item: dict[str, Any]) -> bytes:
        return f"event: {item['type']}\n".encode() + super().encoded(item)

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return the first events. They open a message at once, unless a call or reasoning may come in its place."""
        events = [self._event(name, response=self._response("in_progress", []))
                  for name in ("created", "in_progress")]
        closed = self.prepared.calls or self.prepared.reasoning
        return events if closed else [*events, *self._begin(_text_item("message"))]

    def pieces(self, index: int, pieces: Sequence[AnswerPiece], logprobs: Sequence[TokenLogprob] = ()
               ) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, CallPiece):
                if piece.name is not None:
                    events += [*self._finished(), *self._begin(_call_item(piece))]
                if piece.arguments:
                    self._output[-1]["arguments"] += piece.arguments
                    events.append(self._item_event("function_call_arguments.delta", delta=piece.arguments))
                continue
            kind: Literal["message", "reasoning"] = "message" if isinstance(piece, str) else "reasoning"
            text = piece if isinstance(piece, str) else piece.text
            if not self._open or self._output[-1]["type"] != kind:
                events += [*self._finished(), *self._begin(_text_item(kind))]
            self._output[-1]["content"][0]["text"] += text
            part_event, fields = _PARTS[kind]
            events.append(self._item_event(f"{part_event}.delta", content_index=0, delta=text, **fields))
        return events

    def closing(self, index: int, finish: Finish, extra: dict[str, Any] | None = None,
                stop: str | None = None) -> list[dict[str, Any]]:
        self._finish, self._details = finish, extra or {}
        events = [] if self._output else self._begin(_text_item("message"))
        return [*events, *self._finished(self._status)]

    def counts(self, usage: dict[str, Any], figures: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._event(self._status, response=self._response(self._status, self._output, usage)
                            | {"flowspec": figures | self._details})]

    def _begin(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Open an item; a text's only part is opened with it."""
        self._output.append(item)
        self._open = True
        if item["type"] == "function_call":
            return [self._event("output_item.added", output_index=self._at, item=dict(item))]
        return [self._event("output_item.added", output_index=self._at, item={**item, "content": []}),
                self._item_event("content_part.added", content_index=0, part=dict(item["content"][0]))]

    def _finished(self, status: str = "completed") -> list[dict[str, Any]]:
        """Close the open item, if there is one."""
        if not self._open:
            return []
        self._open, item = False, self._output[-1]
        item["status"] = status
        if item["type"] != "function_call":
            [part] = item["content"]
            part_event, fields = _PARTS[item["type"]]
            events = [self._item_event(f"{part_event}.done", content_index=0, text=part["text"], **fields),
                      self._item_event("content_part.done", content_index=0, part=part)]
        else:
            events = [self._item_event("function_call_arguments.done", name=item["name"],
                                       arguments=item["arguments"])]
        return [*events, self._event("output_item.done", output_index=self._at, item=item)]

    @property
    def _at(self) -> int:
        return len(self._output) - 1

    def failure(self, error: ApiError) -> dict[str, Any]:
        failed = {"error": {"code": error.code or "server_error", "message": str(error)}}
        return self._event("failed", response=self._response("failed", []) | failed)

    def usage(self, tokens: int, results: Sequence[Result | None], reasoning_tokens: int = 0) -> dict[str, Any]:
        chat = super().usage(tokens, results, reasoning_tokens)
        cached = chat.get("prompt_tokens_details", {"cached_tokens": 0})
        return {"input_tokens": chat["prompt_tokens"],
                "input_tokens_details": {**cached, "cache_write_tokens": 0},
                "output_tokens": tokens, "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": chat["total_tokens"]}

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None = None
                  ) -> dict[str, Any]:
        body, sampling = self._body, self.prepared.request.sampling
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        text_format = body.text and body.text.format
        form = text_format.model_dump(by_alias=True, exclude_unset=True) if text_format else {"type": "text"}
        return {"id": self.id, "object": "response", "created_at": self.created, "status": status,
                "background": False, "error": None, "incomplete_details": cut,
                "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
                "metadata": body.metadata or {}, "model": self.model, "output": output,
                "parallel_tool_calls": body.parallel_tool_calls is not False,
                "previous_response_id": None, "store": False, "temperature": sampling.temperature,
                "text": {"format": form},
                "tool_choice": _flat(body.tool_choice) if body.tool_choice else "auto",
                "tools": [{"strict": None, "parameters": None, **_flat(tool)} for tool in body.tools or ()],
                "top_p": sampling.top_p,
                "truncation": "disabled", "usage": usage, "user": body.user}

    def _item_event(self, event: str, /, **fields: Any) -> dict[str, Any]:
        return self._event(event, item_id=self._output[-1]["id"], output_index=self._at, **fields)

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}


# The type of an item's only part, and what its events have besides the text.
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {"message": ("output_text", {"logprobs": []}),
                                                 "reasoning": ("reasoning_text", {})}


def _text_item(kind: Literal["message", "reasoning"]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", "summary": [],
                "content": [{"type": "reasoning_text", "text": ""}]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", "role": "assistant",
            "content": [part]}


def _call_item(piece: CallPiece) -> dict[str, Any]:
    return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress",
            "call_id": piece.id, "name": piece.name, "arguments": ""}


def _flat(tool: ToolDefinition | NamedTool | str) -> Any:
    """Return a tool, or a choice of one, as responses have it: the function's fields beside its type."""
    return tool if isinstance(tool, str) else {"type": "function", **tool.function.model_dump()}
