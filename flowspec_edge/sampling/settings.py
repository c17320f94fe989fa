"""How the next token is chosen, and how drafts are ranked: the user's choices, without numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flowspec_edge.errors import UsageError

Rank = Literal["draft", "noise"]

_LEAST_REPETITION, _MOST_REPETITION = 0.01, 100.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn; ``temperature`` 0 is greedy, and so is ``top_p`` 0.

    ``top_k`` 0 keeps all tokens.  ``min_p`` keeps the tokens that are at least so likely as this share of the
    likeliest one, after temperature, top-k and top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not 0.001 <= self.temperature <= 100.0:
            raise UsageError(f"temperature must be 0 (greedy) or 0.001 to 100, not {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise UsageError(f"top-k must be 0 (off) or positive, below 2^31, not {self.top_k}")
        if not 0.0 <= self.top_p <= 1.0:
            raise UsageError(f"top-p must be from 0 (greedy) to 1 (off), not {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise UsageError(f"min-p must be from 0 (off) to 1, not {self.min_p}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be between 0 and 2^63 - 1, not {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0

    @property
    def least_log(self) -> float:
        """The least score x / T, beside a largest one of 0, that min-p does not exclude."""
        return math.log(self.min_p) if self.min_p else -math.inf


@dataclass(frozen=True, slots=True)
class Penalties:
    """What changes logits before temperature, top-k, top-p and a grammar.

    First logit_bias is added.  Then the logit of a token of the prompt or of the answer before the row is divided by
    repetition if it is positive, else multiplied (transformers).  At last frequency x count + (presence if count) is
    subtracted, with the token's count in the answer before the row (OpenAI).

    frequency, presence  -2 to 2; positive: repetitions are less likely
    logit_bias           token id -> -100 to 100
    repetition           above 0; above 1: what the text has is less likely

    UsageError for other values.
    """

    frequency: float = 0.0
    presence: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("frequency", self.frequency), ("presence", self.presence)):
            if not -2.0 <= value <= 2.0:
                raise UsageError(f"the {name} penalty must be from -2 to 2, not {value}")
        if not _LEAST_REPETITION <= self.repetition <= _MOST_REPETITION:
            raise UsageError(f"the repetition penalty must be from {_LEAST_REPETITION:g} to "
                             f"{_MOST_REPETITION:g} (1: off), not {self.repetition}")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise UsageError(f"the bias of token {token} must be from -100 to 100, not {bias}")

    def __bool__(self) -> bool:
        return bool(self.frequency or self.presence or self.repetition != 1.0
                    or any(self.logit_bias.values()))

    def cost(self, count: int) -> float:
        """Return what a token's logit loses after an answer that has it ``count`` times."""
        return count * self.frequency + (self.presence if count else 0.0)


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Which tokens may come next, whatever their logits, by the text before the row.

    allowed     the only tokens of the answer; None: all
    bad_words   sequences of tokens that the text may not contain: the last is excluded after the others
    min_tokens  until the answer is so long, no token ends it

    UsageError for other values.
    """

    allowed: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.allowed is not None and not self.allowed:
            raise UsageError("the allowed tokens must be at least one")
        if not all(self.bad_words):
            raise UsageError("a bad word must have at least one token")
        if self.min_tokens < 0:
            raise UsageError(f"the least number of tokens must not be negative, not {self.min_tokens}")

    def __bool__(self) -> bool:
        return bool(self.allowed is not None or self.bad_words or self.min_tokens)

    @property
    def tokens(self) -> set[int]:
        """All that are named."""
        return {*(self.allowed or ()), *(token for word in self.bad_words for token in word)}
