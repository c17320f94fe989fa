"""The JSON objects of OpenAI's answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flowspec_edge.runtime.request import Likelihood, Request, Result

Finish = Literal["stop", "length"]

_PARTIAL = "\ufffd"  # the text of a token that holds a part of a character


@dataclass
class Answer:
    """An answer of either endpoint, in one piece or as a stream's chunks.

    chat           chat completion, or plain completion
    include_usage  chunks have "usage": null, and one more chunk has the counts
    """

    chat: bool
    model: str
    request: Request
    include_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex

    def complete(self, text: str, finish: Finish, usage: dict[str, Any],
                 logprobs: Sequence[TokenLogprob] = (), extra: dict[str, Any] | None = None
                 ) -> dict[str, Any]:
        """``logprobs`` and ``extra`` (:meth:`details`) are given if the client asked for them."""
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat \
            else {"text": text}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, [self._choice(content, finish, logprobs)], usage=usage, **(extra or {}))

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before any text: a chat's has the role."""
        if not self.chat:
            return []
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})]

    def piece(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        return self._chunk({"delta": {"content": text}} if self.chat else {"text": text}, logprobs=logprobs)

    def closing(self, finish: Finish, usage: dict[str, Any], extra: dict[str, Any] | None = None
                ) -> list[dict[str, Any]]:
        """The last chunks: the finish reason, with :meth:`details` and the counts if the client asked."""
        last = [self._chunk({"delta": {}} if self.chat else {"text": ""}, finish) | (extra or {})]
        if self.include_usage:
            last.append(self._object(self._kind, [], usage=usage))
        return last

    def details(self, tokens: Sequence[int], result: Result | None) -> dict[str, Any]:
        """Extend OpenAI's API: the answer's token ids and the run's statistics (None after a stop string)."""
        stats = None if result is None else result.as_json("")["stats"]
        return {"flowspec": {"tokens": list(tokens), "stats": stats}}

    def usage(self, tokens: int, result: Result | None) -> dict[str, Any]:
        """Token counts; under "flowspec" the settings to reproduce the answer, and the run's statistics.
        ``result``: None if a stop string ended the answer."""
        prompt, sampling = len(self.request.prompt), self.request.sampling
        own: dict[str, Any] = {"strategy": self.request.strategy, "seed": sampling.seed,
                                "temperature": sampling.temperature, "top_p": sampling.top_p,
                                "top_k": sampling.top_k}
        cached: dict[str, Any] = {}
        if result is not None:
            stats = result.stats
            cached = {"prompt_tokens_details": {"cached_tokens": stats.reused}}
            own |= {"tokens_per_second": stats.tokens_per_second, "ttft_s": stats.ttft_s, "alt": stats.alt,
                     "alr": stats.alr, "rounds": stats.rounds, "drafted": stats.drafted,
                     "verified": stats.verified, "accepted": stats.accepted}
            if stats.energy_j is not None:
                own |= {"energy_j": stats.energy_j, "energy_above_idle_j": stats.energy_above_idle_j}
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
                **cached, "flowspec": own}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, content: dict[str, Any], finish: Finish | None = None,
               logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        extra = {"usage": None} if self.include_usage else {}
        return self._object(self._kind, [self._choice(content, finish, logprobs)], **extra)

    def _choice(self, content: dict[str, Any], finish: Finish | None, logprobs: Sequence[TokenLogprob]
                ) -> dict[str, Any]:
        shape = chat_logprobs if self.chat else completion_logprobs
        shown = shape(logprobs) if logprobs else None
        return {"index": 0, **content, "logprobs": shown, "finish_reason": finish}

    def _object(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model,
                "choices": choices, **extra}


def model_object(name: str, created: int) -> dict[str, Any]:
    """A model as /v1/models lists it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "flowspec"}


@dataclass(frozen=True)
class TokenLogprob:
    """``top``: texts and log-probabilities of the likeliest tokens."""

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
    """``logprobs`` of a chat completion's choice."""
    return {"content": [{**_token(token.text, token.logprob),
                         "top_logprobs": [_token(text, logprob) for text, logprob in token.top]}
                        for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``logprobs`` of a completion's choice: the top ones always include the token itself, and of tokens
    with the same text only the likeliest."""
    tops = [{token.text: token.logprob, **dict(reversed(token.top))} if token.top else {} for token in tokens]
    return {"tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [token.offset for token in tokens]}


def _token(text: str, logprob: float) -> dict[str, Any]:
    whole = _PARTIAL not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
