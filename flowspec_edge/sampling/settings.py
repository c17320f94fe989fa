"""How the next token is chosen, and how drafts are ranked: the user's choices, without numpy."""

from __future__ import annotations

from dataclasses import dataclass
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
