"""What a caller asks of a cluster, and what it gets: the contract between runtime and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params

if TYPE_CHECKING:
    from flowspec_edge.runtime.tickets import Ticket

FinishReason = Literal["stop", "length", "cancelled"]  # cancelled: nobody waits for it any more
OnTokens = Callable[[list[int]], None]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely the target found a token where it stands, whatever the temperature, top-k and top-p.

    logprob  the natural logarithm of its probability
    top      the likeliest tokens and theirs, the likeliest first, as many as were asked for
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Request:
    """One text to continue; ``prompt`` is token ids."""

    prompt: Sequence[int]
    strategy: str = DEFAULT_STRATEGY
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    params: Params = field(default_factory=Params)
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence ids; the one met is not returned
    logprobs: int | None = None  # tell of each token how likely it was, and so many others (Likelihood)


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
    reused: int = 0  # prompt rows that were not read in again


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
    """Something that answers a request: processes, or virtual time."""

    clock: str

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request to its end; ``on_tokens`` gets new tokens as they are committed."""

    def close(self) -> None:
        """End every process and socket; safe to call twice."""


class SharedCluster(Cluster, Protocol):
    """One that answers several requests at once: any thread hands them in, one thread serves."""

    @property
    def trouble(self) -> str | None:
        """What was lost, and is waited for, while the cluster mends itself; None: all stages are there.

        May be asked from any thread.
        """

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> Ticket:
        """Hand a request in; it is answered while some thread is in :meth:`serve`.

        UsageError if the cluster cannot run such a request; whatever else is wrong comes with the
        ticket.
        """

    def serve(self, stop: Callable[[], bool]) -> None:
        """Answer what was handed in until ``stop()``, asked often, is true; what is not answered then
        goes on with the next call.

        FlowspecError, which every open request ends with too, if the cluster is lost.
        """
