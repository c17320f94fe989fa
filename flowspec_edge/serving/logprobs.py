"""How likely an answer's tokens were, in the two shapes that OpenAI's endpoints have for it.

Knows these shapes and how a single token is written.  Does not know where likelihoods come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec_edge.runtime.request import Likelihood

_UNFINISHED = "\ufffd"  # what a token is written as that holds a part of a character


@dataclass(frozen=True)
class Spelled:
    """A token's likelihood with its text; ``top``: the likeliest tokens' texts and log-probabilities."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int  # characters of the answer, as its tokens are written one by one, before it


class Speller:
    """Writes an answer's tokens, one after the other."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._offset = 0

    def spell(self, likelihoods: Sequence[Likelihood]) -> list[Spelled]:
        """The next ones."""
        spelled = []
        for likely in likelihoods:
            text = self._decode([likely.token])
            top = tuple((self._decode([token]), logprob) for token, logprob in likely.top)
            spelled.append(Spelled(text, likely.logprob, top, self._offset))
            self._offset += len(text)
        return spelled


def chat_logprobs(tokens: Sequence[Spelled]) -> dict[str, Any]:
    """As in a chat completion's choice."""
    return {"content": [{**_token(token.text, token.logprob),
                         "top_logprobs": [_token(text, logprob) for text, logprob in token.top]}
                        for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[Spelled]) -> dict[str, Any]:
    """As in a completion's choice: where others are wanted the token itself is always among them; of those
    that are written alike the likelier one stays."""
    tops = [{token.text: token.logprob, **dict(reversed(token.top))} if token.top else {} for token in tokens]
    return {"tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [token.offset for token in tokens]}


def _token(text: str, logprob: float) -> dict[str, Any]:
    whole = _UNFINISHED not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
