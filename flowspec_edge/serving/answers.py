"""The objects that OpenAI's endpoints answer with.

Knows their fields.  Does not know how text comes about or is sent.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flowspec_edge.runtime.request import Request, Result
from flowspec_edge.serving.logprobs import Spelled, chat_logprobs, completion_logprobs

Finish = Literal["stop", "length"]


@dataclass
class Answer:
    """One answer of either endpoint: whole, or as the chunks of a stream.

    chat           chat completion, or plain completion
    include_usage  chunks say "usage": null, and one more chunk says the counts
    """

    chat: bool
    model: str
    request: Request
    include_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex

    def whole(self, text: str, finish: Finish, usage: dict[str, Any], likely: Sequence[Spelled] = (),
              ours: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer in one piece; ``likely`` of its tokens, and :meth:`details`, if they are wanted."""
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat \
            else {"text": text}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, [self._choice(content, finish, likely)], usage=usage, **(ours or {}))

    def opening(self) -> list[dict[str, Any]]:
        """What comes before any text: a chat says who speaks."""
        if not self.chat:
            return []
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})]

    def piece(self, text: str, likely: Sequence[Spelled] = ()) -> dict[str, Any]:
        """More text, and how likely the tokens were that were read for it."""
        return self._chunk({"delta": {"content": text}} if self.chat else {"text": text}, likely=likely)

    def closing(self, finish: Finish, usage: dict[str, Any], ours: dict[str, Any] | None = None
                ) -> list[dict[str, Any]]:
        """Why it ended, with :meth:`details` and the counts if they are wanted."""
        last = [self._chunk({"delta": {}} if self.chat else {"text": ""}, finish) | (ours or {})]
        if self.include_usage:
            last.append(self._object(self._kind, [], usage=usage))
        return last

    def details(self, tokens: Sequence[int], result: Result | None) -> dict[str, Any]:
        """What no client of OpenAI's asks for: the answer's token ids, and all of the run's figures; these
        are None for an answer that a stop string ended."""
        stats = None if result is None else result.as_json("")["stats"]
        return {"flowspec": {"tokens": list(tokens), "stats": stats}}

    def usage(self, tokens: int, result: Result | None) -> dict[str, Any]:
        """Token counts; under "flowspec" what makes the answer repeatable, and the run's figures.

        ``result``: None for an answer that a stop string ended: its run had no end of its own.
        """
        prompt, sampling = len(self.request.prompt), self.request.sampling
        ours: dict[str, Any] = {"strategy": self.request.strategy, "seed": sampling.seed,
                                "temperature": sampling.temperature, "top_p": sampling.top_p,
                                "top_k": sampling.top_k}
        cached: dict[str, Any] = {}
        if result is not None:
            stats = result.stats
            cached = {"prompt_tokens_details": {"cached_tokens": stats.reused}}
            ours |= {"tokens_per_second": stats.tokens_per_second, "ttft_s": stats.ttft_s, "alt": stats.alt,
                     "alr": stats.alr, "rounds": stats.rounds, "drafted": stats.drafted,
                     "verified": stats.verified, "accepted": stats.accepted}
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
                **cached, "flowspec": ours}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, content: dict[str, Any], finish: Finish | None = None, likely: Sequence[Spelled] = ()
               ) -> dict[str, Any]:
        extra = {"usage": None} if self.include_usage else {}
        return self._object(self._kind, [self._choice(content, finish, likely)], **extra)

    def _choice(self, content: dict[str, Any], finish: Finish | None, likely: Sequence[Spelled]
                ) -> dict[str, Any]:
        shape = chat_logprobs if self.chat else completion_logprobs
        return {"index": 0, **content, "logprobs": shape(likely) if likely else None, "finish_reason": finish}

    def _object(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model,
                "choices": choices, **extra}


def model_object(name: str, created: int) -> dict[str, Any]:
    """A model as /v1/models lists it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "flowspec"}
