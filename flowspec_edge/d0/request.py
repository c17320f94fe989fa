"""Requests, their handles and results, and what all clusters offer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

from flowspec_edge.d0.request_state import RequestEvent, RequestState, next_state
from flowspec_edge.model.grammar import Grammar
from flowspec_edge.sampling.settings import Penalties, Restrictions, Sampling
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params

FinishReason = Literal["stop", "length", "cancelled"]
SchedulingPolicy = Literal["fair", "fcfs"]  # how requests share a batch: ``d0.row_shares``
OnTokens = Callable[[list[int]], None]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token's probability under the target model: before penalties, temperature, top-k, top-p, min-p, grammar.

    logprob  natural logarithm
    top      the ``Request.logprobs`` most likely tokens and their log probabilities, in descending order
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    strategy: str = DEFAULT_STRATEGY
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    params: Params = field(default_factory=Params)
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence ids; not part of the result
    logprobs: int | None = None  # number of alternatives in each token's Likelihood; None: no Likelihood
    grammar: Grammar | None = None  # what the answer must match, which ends it when it is complete
    penalties: Penalties | None = None  # on what the answer repeats, and on single tokens
    restrictions: Restrictions | None = None  # on the tokens that may come next
    priority: int = 0  # beside its caller's; lower begins earlier, and one less quadruples the guaranteed rows
    caller: tuple[str, ...] = ()  # callers share places and guaranteed rows equally, level by level


@dataclass(frozen=True)
class Stats:
    """Measured alike for every strategy, after truncation (docs: turns and rounds).

    An answer of at most one token, which prefill yields, has no speed: its rates and latencies are None.
    """

    turns: float = 0.0  # decode time / one slot of the slowest stage
    rounds: int = 0
    alt: float | None = None  # tokens per turn
    alr: float | None = None  # tokens per round
    tokens_per_second: float | None = None  # generated tokens after the first / decode time
    ttft_s: float = 0.0
    itl_p50_s: float | None = None  # inter-token latency, median and 95th percentile; 0 in an accepted run
    itl_p95_s: float | None = None
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    bytes: int = 0
    decode_s: float = 0.0
    slot_s: float = 0.0
    stages: tuple[dict[str, float], ...] = ()  # per stage: compute_s, wait_s, bytes, rows, segments
    reused: int = 0  # prompt rows found in the prefix cache
    draft: str = ""  # what it drafted with: ``registry.draft_label``
    prompt_chunk: int = 0  # tokens of the prompt in each of its segments; where requests share a segment, at most
    # From the boards' power sensors over the whole request; None if a board has no sensor.
    energy_j: float | None = None  # all modules, without carrier boards
    energy_above_idle_j: float | None = None  # minus idle power; None if idle power is unknown


@dataclass(frozen=True)
class Result:
    """An answer; ``tokens`` exclude the prompt and the end-of-sequence id.

    ``token_at``: when each was accepted, in seconds of the cluster's clock; ``stop_id``: the token that ended it,
    if one did.
    """

    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    token_at: tuple[float, ...] = ()
    stop_id: int | None = None

    def as_json(self, text: str) -> dict[str, Any]:
        """Return the ``generate --json`` object."""
        stats = asdict(self.stats)
        stats["stages"] = list(self.stats.stages)
        return {"tokens": self.tokens, "text": text, "finish_reason": self.finish_reason, "stats": stats}


def different_tokens(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Places at which the tokens are not the same; those after the end of the shorter text count, too."""
    equal_tokens = sum(a == b for a, b in zip(tokens, expected, strict=False))
    return max(len(tokens), len(expected)) - equal_tokens


class RequestHandle(Future[Result]):
    """A request from its submission to its end; thread-safe.

    The driving thread sets the result and runs callbacks. It also calls ``on_tokens``, which must be quick
    because all requests wait; if it raises, this request ends with that error.

    likelihoods  one per token passed to ``on_tokens``, if requested
    state        where it is in ``request_state``; the core and the queue move it
    arrived_at   when it was queued, in seconds of the queue's clock
    placed_at    when it first got a place; None before that
    turn_from    when the first token came after it got its present place; None before that
    """

    def __init__(self, request: Request, on_tokens: OnTokens | None = None) -> None:
        super().__init__()
        self.request = request
        self.on_tokens = on_tokens
        self.likelihoods: list[Likelihood] = []
        self.cancel_requested = False
        self.state = RequestState.QUEUED
        self.arrived_at = 0.0
        self.placed_at: float | None = None
        self.turn_from: float | None = None

    def cancel(self) -> bool:
        """End the request within a turn or two; False if it was done before.

        Unlike a plain Future it still gets a result: the tokens generated so far, ``cancelled``.
        """
        self.cancel_requested = True
        return not self.done()

    def take(self, event: RequestEvent) -> None:
        """Take an event of the request from the cluster; RuntimeError if it cannot happen in the request's state."""
        self.state = next_state(self.state, event)

    @property
    def waited_s(self) -> float | None:
        """Seconds until it got its first place; None before that."""
        return None if self.placed_at is None else self.placed_at - self.arrived_at

    def fail(self, error: BaseException) -> None:
        """End the request with a copy of ``error``.

        The cluster calls this with one error for all requests, and several threads may raise it.
        """
        raised = copy.copy(error)
        raised.__cause__ = error
        self.set_exception(raised)

    def set_cancelled(self) -> None:
        """Note, for the cluster, that the request was cancelled before it began."""
        self.set_result(Result([], "cancelled", Stats()))


class ClusterState(Enum):
    STOPPED = "stopped"  # no cluster is up; a request may start one
    RUNNING = "running"
    RECOVERING = "recovering"  # a stage is lost; open requests wait until all stages are back


@dataclass(frozen=True)
class ClusterStatus:
    """The state of a cluster; during recovery ``outage`` says which stage is lost and why."""

    state: ClusterState
    outage: str = ""


class ClusterBackend(Protocol):
    """Answers requests, by processes or by a simulation in virtual time."""

    clock: str

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request to its end; ``on_tokens`` gets new tokens as they are committed."""

    def generate_many(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None
                      ) -> list[Result]:
        """Run requests concurrently; results in their order, with ``token_at`` in seconds after the call.

        arrivals  seconds after the call at which each arrives; all at 0 by default

        UsageError if they cannot run together, or not on such a cluster (megatron, galaxy).
        """

    def close(self) -> None:
        """End every process and socket; idempotent."""
