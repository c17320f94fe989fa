"""How the next token is chosen, and how drafts are ranked: the user's choices, without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flowspec_edge.errors import UsageError

Rank = Literal["draft", "noise"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy, ``top_k`` 0 keeps all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not 0.001 <= self.temperature <= 100.0:
            raise UsageError(f"temperature must be 0 (greedy) or 0.001 to 100, not {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise UsageError(f"top-k must be 0 (off) or positive, below 2^31, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be between 0 and 2^63 - 1, not {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Penalties:
    """OpenAI's: before temperature, top-k, top-p and a grammar, a token's logit changes by logit_bias -
    frequency x count - (presence if count), with its count in the answer before the row.

    frequency, presence  -2 to 2; positive: repetitions are less likely
    logit_bias           token id -> -100 to 100

    UsageError for other values.
    """

    frequency: float = 0.0
    presence: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("frequency", self.frequency), ("presence", self.presence)):
            if not -2.0 <= value <= 2.0:
                raise UsageError(f"the {name} penalty must be from -2 to 2, not {value}")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise UsageError(f"the bias of token {token} must be from -100 to 100, not {bias}")

    def __bool__(self) -> bool:
        return bool(self.frequency or self.presence or any(self.logit_bias.values()))

    def change(self, token: int, count: int) -> float:
        """Of the logit of ``token`` after an answer that has it ``count`` times."""
        penalty = count * self.frequency + (self.presence if count else 0.0)
        return self.logit_bias.get(token, 0.0) - penalty
