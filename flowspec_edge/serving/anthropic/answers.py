"""Anthropic's answers: a message of blocks, or the events in which it comes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec_edge.d0.request import Result
from flowspec_edge.serving.openai.detokenize import CallPiece
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.prepare import PreparedRequest
from flowspec_edge.serving.openai.reasoning import ReasoningPiece
from flowspec_edge.serving.openai.responses import Answer, AnswerPiece, Finish, TokenLogprob
from flowspec_edge.serving.openai.schemas import ChatBody

_REASONS: dict[Finish, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer(Answer):
    """Blocks of thinking, text and tool calls, in the order in which they are written."""

    end = b""

    def __init__(self, body: ChatBody, prepared: PreparedRequest) -> None:
        super().__init__(body, prepared)
        self.id = f"msg_{uuid.uuid4().hex}"
        self.headers: Mapping[str, str] = {"request-id": self.id}
        self._blocks: list[dict[str, Any]] = []  # of which the last may be open
        self._open = False
        self._arguments = ""  # of the open call
        self._reason: str | None = None
        self._stop: str | None = None
        self._details: dict[str, Any] = {}
        self._was_cut = (body.limit or 0) > prepared.request.max_new_tokens  # to the room in the context

    def encoded(self, item: dict[str, Any]) -> bytes:
        return f"event: {item['type']}\n".encode() + super().encoded(item)

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic_body

    def complete(self, choices: list[dict[str, Any]], usage: dict[str, Any], figures: dict[str, Any],
                 extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._message(usage) | {"flowspec": figures | (extra or {})}

    def choice(self, index: int, pieces: Sequence[AnswerPiece], finish: Finish | None,
               logprobs: Sequence[TokenLogprob] = (), extra: dict[str, Any] | None = None,
               stop: str | None = None) -> dict[str, Any]:
        """Return a call that the limit cut off is left out: its input would be no object."""
        self.pieces(index, pieces)
        self.closing(index, finish or "stop", stop=stop)
        self._blocks = [block for block in self._blocks if block.get("input", {}) is not None]
        return {}  # the only one, whose blocks are the message's content

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._message(self.usage(0, []))}]

    def pieces(self, index: int, pieces: Sequence[AnswerPiece], logprobs: Sequence[TokenLogprob] = ()
               ) -> list[dict[str, Any]]:
        return [event for piece in pieces for event in self._events(piece)]

    def closing(self, index: int, finish: Finish, extra: dict[str, Any] | None = None,
                stop: str | None = None) -> list[dict[str, Any]]:
        self._details = extra or {}
        by_stop_string = finish == "stop" and stop is not None
        self._reason = "stop_sequence" if by_stop_string else _REASONS[finish]
        self._stop = stop if by_stop_string else None
        if finish == "length" and self._was_cut:
            self._reason = "model_context_window_exceeded"
        return self._finished()

    def counts(self, usage: dict[str, Any], figures: dict[str, Any]) -> list[dict[str, Any]]:
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        return [{"type": "message_delta", "delta": delta, "usage": usage, "flowspec": figures | self._details},
                {"type": "message_stop"}]

    def usage(self, tokens: int, results: Sequence[Result | None], reasoning_tokens: int = 0) -> dict[str, Any]:
        """Return the field "usage"; ``input_tokens`` are those that did not come from the cache."""
        cached = sum(result.stats.reused for result in results if result is not None)
        details = {"output_tokens_details": {"thinking_tokens": reasoning_tokens}} if self.prepared.reasoning else {}
        return {"input_tokens": self.prepared.prompt_tokens - cached, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached, "output_tokens": tokens, **details}

    def _events(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        if isinstance(piece, CallPiece):
            events = list[dict[str, Any]]()
            if piece.name is not None:
                block: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                events = [*self._finished(), *self._begin(block)]
            self._arguments += piece.arguments
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            return [*events, *([self._delta(delta)] if piece.arguments else [])]
        if isinstance(piece, ReasoningPiece):
            events = self._begin_unless_open({"type": "thinking", "thinking": "", "signature": ""})
            self._blocks[-1]["thinking"] += piece.text
            return [*events, self._delta({"type": "thinking_delta", "thinking": piece.text})]
        events = self._begin_unless_open({"type": "text", "text": ""})
        self._blocks[-1]["text"] += piece
        return [*events, self._delta({"type": "text_delta", "text": piece})]

    def _begin_unless_open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open and self._blocks[-1]["type"] == block["type"]:
            return []
        return [*self._finished(), *self._begin(block)]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._blocks.append(block)
        self._open, self._arguments = True, ""
        return [{"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}]

    def _finished(self) -> list[dict[str, Any]]:
        """Close the open block, if there is one."""
        if not self._open:
            return []
        self._open, block = False, self._blocks[-1]
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(self._arguments)
            except ValueError:
                block["input"] = None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model,
                "content": [*self._blocks], "stop_reason": self._reason, "stop_sequence": self._stop,
                "usage": usage}
