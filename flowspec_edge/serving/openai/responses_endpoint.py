"""OpenAI's Responses API, for text: a body is a chat's under other names, and so is the answer.

The server stores nothing, so a conversation is always in the request's ``input``.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from flowspec_edge.runtime.request import Result
from flowspec_edge.serving.openai.detokenize import CallPiece
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.fields import Endpoint
from flowspec_edge.serving.openai.prepare import PreparedRequest
from flowspec_edge.serving.openai.responses import Answer, Finish, TokenLogprob
from flowspec_edge.serving.openai.schemas import (
    ChatBody,
    ChatMessage,
    Ignoring,
    ResponseFormat,
    Whole,
)


def _messages(value: Any) -> Any:
    """``input``, as a chat's messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [_message(item) for item in value] if isinstance(value, list) else value


def _message(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise ValueError('must be a string, or messages {"role": …, "content": …}: text is all that this '
                         "server reads")
    content = item.get("content")
    if isinstance(content, list):
        content = [{**part, "type": "text"} if isinstance(part, dict)
                   and part.get("type") in ("input_text", "output_text") else part for part in content]
    return {"role": item.get("role"), "content": content}


class TextOptions(Ignoring):
    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None  # OpenAI's default; the model was not trained to others


def _included(value: Any) -> Any:
    """What a response may include; it has no reasoning, sources or images of its own to include."""
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
    """One message of one text: as an object, or as typed events."""

    end = b""

    def __init__(self, body: ResponsesBody, prepared: PreparedRequest) -> None:
        super().__init__(body, prepared)
        self._body = body
        self.id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._numbers = count()  # of events
        self._text = ""
        self._finish: Finish | None = None
        self._details: dict[str, Any] = {}

    def complete(self, choices: list[dict[str, Any]], usage: dict[str, Any], figures: dict[str, Any],
                 extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._response(self._status, choices, usage) | {"flowspec": figures | (extra or {})}

    def choice(self, index: int, pieces: Sequence[str | CallPiece], finish: Finish | None,
               logprobs: Sequence[TokenLogprob] = (), extra: dict[str, Any] | None = None) -> dict[str, Any]:
        self._text, self._finish = "".join(piece for piece in pieces if isinstance(piece, str)), finish
        return self._item(self._status, [self._part()])

    def encoded(self, item: dict[str, Any]) -> bytes:
        return f"event: {item['type']}\n".encode() + super().encoded(item)

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [*(self._event(name, response=self._response("in_progress", []))
                  for name in ("created", "in_progress")),
                self._event("output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._part_event("content_part.added", part=self._part())]

    def pieces(self, index: int, pieces: Sequence[str | CallPiece], logprobs: Sequence[TokenLogprob] = ()
               ) -> list[dict[str, Any]]:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        self._text += "".join(texts)
        return [self._part_event("output_text.delta", delta=text, logprobs=[]) for text in texts]

    def closing(self, index: int, finish: Finish, extra: dict[str, Any] | None = None
                ) -> list[dict[str, Any]]:
        self._finish, self._details = finish, extra or {}
        return [self._part_event("output_text.done", text=self._text, logprobs=[]),
                self._part_event("content_part.done", part=self._part()),
                self._event("output_item.done", output_index=0,
                            item=self._item(self._status, [self._part()]))]

    def counts(self, usage: dict[str, Any], figures: dict[str, Any]) -> list[dict[str, Any]]:
        output = [self._item(self._status, [self._part()])]
        return [self._event(self._status, response=self._response(self._status, output, usage)
                            | {"flowspec": figures | self._details})]

    def failure(self, error: ApiError) -> dict[str, Any]:
        failed = {"error": {"code": error.code or "server_error", "message": str(error)}}
        return self._event("failed", response=self._response("failed", []) | failed)

    def usage(self, tokens: int, results: Sequence[Result | None]) -> dict[str, Any]:
        chat = super().usage(tokens, results)
        cached = chat.get("prompt_tokens_details", {"cached_tokens": 0})
        return {"input_tokens": chat["prompt_tokens"],
                "input_tokens_details": {**cached, "cache_write_tokens": 0},
                "output_tokens": tokens, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": chat["total_tokens"]}

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None = None
                  ) -> dict[str, Any]:
        body, sampling = self._body, self.prepared.request.sampling
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        wanted = body.text and body.text.format
        form = wanted.model_dump(by_alias=True, exclude_unset=True) if wanted else {"type": "text"}
        return {"id": self.id, "object": "response", "created_at": self.created, "status": status,
                "background": False, "error": None, "incomplete_details": cut,
                "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
                "metadata": body.metadata or {}, "model": self.model, "output": output,
                "parallel_tool_calls": True, "previous_response_id": None, "store": False,
                "temperature": sampling.temperature, "text": {"format": form}, "tool_choice": "auto",
                "tools": [], "top_p": sampling.top_p, "truncation": "disabled", "usage": usage,
                "user": body.user}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant",
                "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _part_event(self, name: str, **fields: Any) -> dict[str, Any]:
        return self._event(name, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}
