"""What a caller asks of a cluster, and what it gets: the contract between runtime and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params

FinishReason = Literal["stop", "length", "cancelled"]  # cancelled: nobody waits for it any more
OnTokens = Callable[[list[int]], None]


@dataclass(frozen=True)
class Request:
    """One text to continue; ``prompt`` is token ids."""

    prompt: Sequence[int]
    strategy: str = "flowspec"
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    params: Params = field(default_factory=Params)
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence ids; the one met is not returned


@dataclass(frozen=True)
class Stats:
    """Counted alike for every strategy, after truncation (see docs: turns and rounds)."""

    turns: float  # decode time / one slot of the slowest stage
    rounds: int
    alt: float  # tokens per turn
    alr: float  # tokens per round
    tokens_per_second: float  # generated tokens after the first / decode time
    ttft_s: float
    itl_p50_s: float  # inter-token latency, median and 95th percentile; accepted together: 0
    itl_p95_s: float
    drafted: int
    verified: int
    accepted: int
    bytes: int
    decode_s: float
    slot_s: float
    stages: tuple[dict[str, float], ...] = ()  # per stage: compute_s, wait_s, bytes, rows, segments


@dataclass(frozen=True)
class Result:
    """What came out: ``tokens`` without the prompt and without the end-of-sequence id."""

    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats

    def as_json(self, text: str) -> dict[str, Any]:
        """The ``generate --json`` object."""
        from dataclasses import asdict

        stats = asdict(self.stats)
        stats["stages"] = list(self.stats.stages)
        return {"tokens": self.tokens, "text": text, "finish_reason": self.finish_reason, "stats": stats}


class Cluster(Protocol):
    """Something that answers requests one at a time: processes, or virtual time."""

    clock: str

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request to its end; ``on_tokens`` gets new tokens as they are committed."""

    def close(self) -> None:
        """End every process and socket; safe to call twice."""
