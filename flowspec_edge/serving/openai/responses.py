"""The JSON objects of OpenAI's answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from flowspec_edge.d0.request import Likelihood, Result
from flowspec_edge.serving.openai.detokenize import CallPiece
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.field_table import printable_names
from flowspec_edge.serving.openai.prepare import PreparedRequest
from flowspec_edge.serving.openai.reasoning import ReasoningPiece
from flowspec_edge.serving.openai.schemas import Body, ChatBody

Finish = Literal["stop", "length", "tool_calls"]
AnswerPiece = str | ReasoningPiece | CallPiece  # content, reasoning, or a part of a tool call

_PARTIAL = "\ufffd"  # the text of a token that holds a part of a character


class Answer:
    """An answer of either endpoint for completions, in one piece or as a stream's chunks."""

    end = b"data: [DONE]\n\n"  # of a stream
    headers: Mapping[str, str] = {}  # besides those of every answer; content-type is a stream's

    def __init__(self, body: Body, prepared: PreparedRequest) -> None:
        self.chat = isinstance(body, ChatBody)  # or a plain completion
        self.model = body.model
        self.prepared = prepared
        self.include_usage = body.include_usage  # chunks have "usage": null, one more has the counts
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())

    def encoded(self, item: dict[str, Any]) -> bytes:
        """Return an object of the stream, as a server-sent event."""
        return b"data: " + json.dumps(item, ensure_ascii=False).encode() + b"\n\n"

    def keep_alive(self, status: str) -> bytes:
        """Return what a stream sends while no token comes."""
        return f": {status}\n\n".encode()

    def arrived(self) -> None:
        """Note that tokens have come."""

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the stream's last object, if it ends with an error."""
        return error.body

    def complete(self, choices: list[dict[str, Any]], usage: dict[str, Any], figures: dict[str, Any],
                 extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make the body of a complete answer.

        choices  of :meth:`choice`
        figures  of :meth:`figures`
        extra    :meth:`details` of the only choice, if the client asked
        """
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, choices, usage=usage, flowspec=figures | (extra or {}))

    def choice(self, index: int, pieces: Sequence[AnswerPiece], finish: Finish | None,
               logprobs: Sequence[TokenLogprob] = (), extra: dict[str, Any] | None = None,
               stop: str | None = None) -> dict[str, Any]:
        """Return a finished choice.

        logprobs, extra  given if the client asked for them; ``extra`` is :meth:`details` of one of several choices
        stop             the stop string that ended the answer
        """
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        content: dict[str, Any] = {"text": text}
        if self.chat:
            calls = _joined([piece for piece in pieces if isinstance(piece, CallPiece)])
            reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
            message = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
            content = {"message": message | ({"reasoning_content": reasoning} if reasoning else {})
                       | ({"tool_calls": calls} if calls else {})}
        return self._choice(index, content, finish, logprobs) | ({"flowspec": extra} if extra else {})

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return the chunks before any text of a choice; a chat's has the role."""
        if not self.chat:
            return []
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}})]

    def pieces(self, index: int, pieces: Sequence[AnswerPiece], logprobs: Sequence[TokenLogprob] = ()
               ) -> list[dict[str, Any]]:
        """Chunks with new text and parts of tool calls; the first has the ``logprobs``."""
        contents = [self._content(piece) for piece in pieces or ([""] if logprobs else [])]
        return [self._chunk(index, content, logprobs=() if i else logprobs)
                for i, content in enumerate(contents)]

    def _content(self, piece: AnswerPiece) -> dict[str, Any]:
        if isinstance(piece, CallPiece):
            return {"delta": {"tool_calls": [piece.as_delta()]}}
        if isinstance(piece, ReasoningPiece):
            return {"delta": {"reasoning_content": piece.text}}
        return {"delta": {"content": piece}} if self.chat else {"text": piece}

    def closing(self, index: int, finish: Finish, extra: dict[str, Any] | None = None,
                stop: str | None = None) -> list[dict[str, Any]]:
        """Return a choice's last chunk: the finish reason, with :meth:`details` if the client asked.

        ``stop``: the stop string that ended it.
        """
        last = self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, finish)
        return [last | ({"flowspec": extra} if extra else {})]

    def counts(self, usage: dict[str, Any], figures: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the stream's last chunk, if the client asked for the counts."""
        return [self._object(self._kind, [], usage=usage, flowspec=figures)] if self.include_usage else []

    def details(self, tokens: Sequence[int], result: Result | None) -> dict[str, Any]:
        """Extend OpenAI's API: the answer's token ids and the run's statistics (None after a stop string)."""
        stats = None if result is None else result.as_json("")["stats"]
        return {"tokens": list(tokens), "stats": stats}

    def figures(self, results: Sequence[Result | None]) -> dict[str, Any]:
        """Return the field "flowspec", which is beside ``usage``, whose entries clients add up.

        It has the settings that reproduce the first choice, and the runs' statistics. ``results``: None if a stop
        string ended
        the choice.
        """
        request = self.prepared.request
        sampling, penalties = request.sampling, request.penalties
        details: dict[str, Any] = {"strategy": request.strategy, "seed": sampling.seed,
                                   "temperature": sampling.temperature, "top_p": sampling.top_p,
                                   "top_k": sampling.top_k, "min_p": sampling.min_p}
        if penalties:
            details |= {"frequency_penalty": penalties.frequency, "presence_penalty": penalties.presence,
                        "repetition_penalty": penalties.repetition, "logit_bias": penalties.logit_bias}
        if self.prepared.ignored:
            details["ignored"] = printable_names(self.prepared.ignored)
        figures = [_figures(result) for result in results]
        return details | (figures[0] if len(figures) == 1 else {"choices": figures})

    def usage(self, tokens: int, results: Sequence[Result | None], reasoning_tokens: int = 0) -> dict[str, Any]:
        """Token counts of all choices, in OpenAI's fields alone; ``results`` as for :meth:`figures`.

        ``reasoning_tokens``: how many of the tokens are reasoning.
        """
        prompt = self.prepared.prompt_tokens
        details: dict[str, Any] = {}
        reused = [result.stats.reused for result in results[::self.prepared.n] if result is not None]
        if len(reused) == len(self.prepared.prompts):
            details = {"prompt_tokens_details": {"cached_tokens": sum(reused)}}
        if self.prepared.reasoning is not None:
            details["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
                **details}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, index: int, content: dict[str, Any], finish: Finish | None = None,
               logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        extra = {"usage": None} if self.include_usage else {}
        return self._object(self._kind, [self._choice(index, content, finish, logprobs)], **extra)

    def _choice(self, index: int, content: dict[str, Any], finish: Finish | None,
                logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        shape = chat_logprobs if self.chat else completion_logprobs
        shaped = shape(logprobs) if logprobs else None
        return {"index": index, **content, "logprobs": shaped, "finish_reason": finish}

    def _object(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model,
                "choices": choices, **extra}


def _figures(result: Result | None) -> dict[str, Any]:
    """Return a run's statistics, as far as every answer has them."""
    if result is None:
        return {}
    stats = result.stats
    figures: dict[str, Any] = {
        "tokens_per_second": stats.tokens_per_second, "ttft_s": stats.ttft_s, "alt": stats.alt,
        "alr": stats.alr, "rounds": stats.rounds, "drafted": stats.drafted, "verified": stats.verified,
        "accepted": stats.accepted}
    if stats.energy_j is not None:
        figures |= {"energy_j": stats.energy_j, "energy_above_idle_j": stats.energy_above_idle_j}
    return figures


def _joined(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """Return the calls that the pieces form, as a message's ``tool_calls``."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append({"id": piece.id, "type": "function",
                          "function": {"name": piece.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += piece.arguments
    return calls


def list_object(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Models (:func:`model_object`) as a list, of OpenAI's API and of Anthropic's."""
    ids = [model["id"] for model in models]
    return {"object": "list", "data": [*models], "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def model_object(name: str, created: int, context: int, positions: int, vocabulary: int, width: int
                 ) -> dict[str, Any]:
    """Return a model as /v1/models lists it, for OpenAI's clients and Anthropic's.

    The context has the names under which clients look for it: those of vLLM and SGLang, OpenRouter, Groq, Mistral
    and LM Studio, llama.cpp, and Anthropic.

    context    tokens of prompt and answer together that the server admits
    positions  those of the model
    width      of its hidden states
    """
    return {"id": name, "object": "model", "created": created, "owned_by": "flowspec", "root": name,
            "parent": None, "name": name, "type": "model", "display_name": name,
            "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": context, "lifecycle": "active", "max_model_len": context, "context_length": context,
            "context_window": context, "max_context_length": context,
            "meta": {"n_ctx": context, "n_ctx_train": positions, "n_vocab": vocabulary, "n_embd": width}}


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability; ``top``: texts and log-probabilities of the likeliest tokens."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int  # characters before it, as the answer's tokens are decoded one by one


class TokenDecoder:
    """Decodes an answer's tokens one by one."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._offset = 0

    def decode(self, likelihoods: Sequence[Likelihood]) -> list[TokenLogprob]:
        decoded = []
        for likely in likelihoods:
            text = self._decode([likely.token])
            top = tuple((self._decode([token]), logprob) for token, logprob in likely.top)
            decoded.append(TokenLogprob(text, likely.logprob, top, self._offset))
            self._offset += len(text)
        return decoded


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return ``logprobs`` of a chat completion's choice."""
    return {"content": [{**_token(token.text, token.logprob),
                         "top_logprobs": [_token(text, logprob) for text, logprob in token.top]}
                        for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return ``logprobs`` of a completion's choice.

    The top ones always include the token itself, and of tokens with the same text only the likeliest.
    """
    tops = [{token.text: token.logprob, **dict(reversed(token.top))} if token.top else {} for token in tokens]
    return {"tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [token.offset for token in tokens]}


def _token(text: str, logprob: float) -> dict[str, Any]:
    is_complete = _PARTIAL not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_complete else None}
