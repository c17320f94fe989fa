"""Ollama's answers: an object, or a stream of lines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec_edge.d0.request import Result
from flowspec_edge.serving.ollama.requests import now
from flowspec_edge.serving.openai.detokenize import CallPiece
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.prepare import PreparedRequest
from flowspec_edge.serving.openai.reasoning import ReasoningPiece
from flowspec_edge.serving.openai.responses import Answer, AnswerPiece, Finish, TokenLogprob, chat_logprobs
from flowspec_edge.serving.openai.schemas import Body

_NS = 1_000_000_000  # in a second


class ChatAnswer(Answer):
    """The answers of /api/chat.

    A call is sent when it is complete, since its arguments are an object; one that the limit cut off is left out.
    """

    end = b""
    headers: Mapping[str, str] = {"content-type": "application/x-ndjson"}

    def __init__(self, body: Body, prepared: PreparedRequest) -> None:
        super().__init__(body, prepared)
        self._start = time.monotonic()
        self._first: float | None = None  # when the first token came
        self._call: CallPiece | None = None  # that is being written
        self._calls = 0
        self._finish: Finish = "stop"
        self._details: dict[str, Any] = {}

    def arrived(self) -> None:
        self._first = self._first or time.monotonic()

    def encoded(self, item: dict[str, Any]) -> bytes:
        return json.dumps(item, ensure_ascii=False).encode() + b"\n"

    def keep_alive(self, status: str) -> bytes:
        return self.encoded(self._line(self._text_part("")))

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.ollama_body

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def pieces(self, index: int, pieces: Sequence[AnswerPiece], logprobs: Sequence[TokenLogprob] = ()
               ) -> list[dict[str, Any]]:
        parts = [part for piece in pieces for part in self._parts(piece)]
        return [self._line(part, () if at else logprobs)
                for at, part in enumerate(parts or ([self._text_part("")] if logprobs else []))]

    def closing(self, index: int, finish: Finish, extra: dict[str, Any] | None = None,
                stop: str | None = None) -> list[dict[str, Any]]:
        self._finish, self._details = finish, extra or {}
        return [self._line(part) for part in self._called()]

    def counts(self, usage: dict[str, Any], figures: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._line(self._text_part("")) | self._end(usage, figures | self._details)]

    def choice(self, index: int, pieces: Sequence[AnswerPiece], finish: Finish | None,
               logprobs: Sequence[TokenLogprob] = (), extra: dict[str, Any] | None = None,
               stop: str | None = None) -> dict[str, Any]:
        self._finish = finish or "stop"
        parts = [part for piece in pieces for part in self._parts(piece)] + self._called()
        whole = self._text_part("".join(piece for piece in pieces if isinstance(piece, str)))
        if thinking := "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)):
            whole = self._reasoning_part(thinking, whole)
        if calls := [call for part in parts for call in part.get("message", {}).get("tool_calls", ())]:
            whole["message"]["tool_calls"] = calls
        return self._line(whole, logprobs)

    def complete(self, choices: list[dict[str, Any]], usage: dict[str, Any], figures: dict[str, Any],
                 extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return choices[0] | self._end(usage, figures | (extra or {}))

    def usage(self, tokens: int, results: Sequence[Result | None], reasoning_tokens: int = 0) -> dict[str, Any]:
        """Return the counts and times.

        ``load_duration`` is the wait in the queue; after a stop string it is counted as a part of
        ``prompt_eval_duration``.
        """
        end = time.monotonic()
        first = self._first or end
        result = results[0]
        wait_s = first - self._start
        reading = wait_s if result is None else min(result.stats.ttft_s, wait_s)
        seconds = {"total_duration": end - self._start, "load_duration": wait_s - reading,
                   "prompt_eval_duration": reading, "eval_duration": end - first}
        return {**{name: round(value * _NS) for name, value in seconds.items()},
                "prompt_eval_count": self.prepared.prompt_tokens, "eval_count": tokens}

    def _parts(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return what a piece adds to the answer."""
        if isinstance(piece, str):
            return [self._text_part(piece)]
        if isinstance(piece, ReasoningPiece):
            return [self._reasoning_part(piece.text, self._text_part(""))]
        if piece.name is None and self._call is not None:
            self._call = CallPiece(self._call.index, self._call.arguments + piece.arguments, self._call.id,
                                   self._call.name)
            return []
        before = self._called()
        self._call = piece
        return before

    def _called(self) -> list[dict[str, Any]]:
        """Return the call that has been written, if it is complete."""
        call, self._call = self._call, None
        if call is None:
            return []
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            return []
        self._calls += 1
        function = {"index": self._calls - 1, "name": call.name, "arguments": arguments}
        part = self._text_part("")
        part["message"]["tool_calls"] = [{"id": call.id, "function": function}]
        return [part]

    def _text_part(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _reasoning_part(self, text: str, part: dict[str, Any]) -> dict[str, Any]:
        return {"message": part["message"] | {"thinking": text}}

    def _line(self, part: dict[str, Any], logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        likely = {"logprobs": chat_logprobs(logprobs)["content"]} if logprobs else {}
        return {"model": self.model, "created_at": now(), **part, "done": False, **likely}

    def _end(self, usage: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        reason = "length" if self._finish == "length" else "stop"
        return {"done": True, "done_reason": reason, **usage, "flowspec": figures}


class GenerateAnswer(ChatAnswer):
    """The answer of /api/generate, which has no tools."""

    def _text_part(self, text: str) -> dict[str, Any]:
        return {"response": text}

    def _reasoning_part(self, text: str, part: dict[str, Any]) -> dict[str, Any]:
        return part | {"thinking": text}
