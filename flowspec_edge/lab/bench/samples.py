"""Benchmark samples, one a request: all that a benchmark measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from statistics import fmean, quantiles

Cell = tuple[str, str, float]  # (strategy, task, temperature), measured together


@dataclass(frozen=True)
class Sample:
    """One request; times in seconds.

    repeat     what was added to the seed
    tokens_per_second, itl_p50_s, itl_p95_s  None for an answer that :func:`is_short`
    bytes      all that was sent
    draft     what it drafted with (``Stats.draft``); "" in files from before this field
    identical  whether its tokens and its end are those of plain decoding
    near_ties  whether they are not, and near ties of 16 bits explain why
    different_tokens  places at which its token is not plain decoding's, the end of the shorter text included;
               None if it is not known, in files from before this field
    answer     a digest of its tokens and its end: equal for equal texts; "" in files from before this field
    repeating  whether the text repeats itself (``repeats_itself``); None in files from before this field
    energy_j, energy_above_idle_j  as in a request's ``Stats``
    concurrent  None if the request ran alone
    prompt_chunk  as in a request's ``Stats``; None in files from before this field
    """

    strategy: str
    task: str
    temperature: float
    repeat: int
    prompt: int
    tokens: int
    turns: float
    rounds: int
    tokens_per_second: float | None
    decode_s: float
    ttft_s: float
    itl_p50_s: float | None
    itl_p95_s: float | None
    drafted: int
    verified: int
    accepted: int
    bytes: int
    identical: bool
    near_ties: bool = False
    energy_j: float | None = None
    energy_above_idle_j: float | None = None
    repeating: bool | None = None
    concurrent: ConcurrentTiming | None = None
    draft: str = ""
    different_tokens: int | None = None
    answer: str = ""
    prompt_chunk: int | None = None

    @property
    def cell(self) -> Cell:
        return self.strategy, self.task, self.temperature


@dataclass(frozen=True)
class ConcurrentTiming:
    """When a request arrived and got its tokens beside others; times in seconds.

    clients, arrival_rate    of the measurement; the other one is None
    group                    number of its group within the strategy, task and temperature
    arrival_s                since the start of its group
    token_s                  when each token was accepted, since the request's arrival
    alone_tokens_per_second  :func:`speed` of the same request alone
    """

    clients: int | None
    arrival_rate: float | None
    group: int
    arrival_s: float
    token_s: tuple[float, ...]
    alone_tokens_per_second: float | None


@dataclass(frozen=True)
class ConcurrencyFigures:
    """The figures of one row about requests that ran beside others.

    A request's speed is :func:`speed`.  Figures are None if no answer has a speed.

    total_tokens_per_second  the groups' tokens over the time from the first arrival to the last token, sums
                             divided by sums
    slowest_share            a request's speed over its speed alone, the lowest
    fairness                 the slowest request's speed over the fastest one's in a group, the lowest
    pooled_itl_…_s           percentiles of the inter-token latencies of all requests together
    """

    clients: int | None
    arrival_rate: float | None
    total_tokens_per_second: float | None
    slowest_share: float | None
    fairness: float | None
    pooled_itl_p50_s: float | None
    pooled_itl_p95_s: float | None
    pooled_itl_p99_s: float | None


def speed(token_s: Sequence[float]) -> float | None:
    """Tokens over the time from the request's arrival to the last of them, prefill and waiting included.

    None without tokens.
    """
    return len(token_s) / token_s[-1] if token_s else None


def figures_of(timings: Sequence[ConcurrentTiming]) -> ConcurrencyFigures:
    groups: dict[int, list[ConcurrentTiming]] = {}
    for timing in timings:
        if timing.token_s:
            groups.setdefault(timing.group, []).append(timing)
    shares = [rate / alone for timing in timings
              if (rate := speed(timing.token_s)) and (alone := timing.alone_tokens_per_second)]
    seconds = sum(_seconds(group) for group in groups.values())
    gaps = [after - before for timing in timings for before, after in pairwise(timing.token_s)]
    # The cut points are percentiles as numpy's: linear between the sorted values.
    percentiles: Sequence[float | None] = (
        quantiles(gaps, n=100, method="inclusive") if len(gaps) > 1 else gaps * 99 or [None] * 99)
    return ConcurrencyFigures(
        timings[0].clients, timings[0].arrival_rate,
        total_tokens_per_second=sum(len(timing.token_s) for timing in timings) / seconds if seconds else None,
        slowest_share=min(shares, default=None),
        fairness=min(map(_fairness, groups.values()), default=None),
        pooled_itl_p50_s=percentiles[49], pooled_itl_p95_s=percentiles[94], pooled_itl_p99_s=percentiles[98])


def mean_figures(parts: Sequence[ConcurrencyFigures]) -> ConcurrencyFigures:
    """Average figures over tasks; of shares and fairness take the lowest."""
    def over_tasks(combine: Callable[[Iterable[float]], float], name: str) -> float | None:
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        return combine(values) if values else None

    return ConcurrencyFigures(
        parts[0].clients, parts[0].arrival_rate, over_tasks(fmean, "total_tokens_per_second"),
        over_tasks(min, "slowest_share"), over_tasks(min, "fairness"), over_tasks(fmean, "pooled_itl_p50_s"),
        over_tasks(fmean, "pooled_itl_p95_s"), over_tasks(fmean, "pooled_itl_p99_s"))


def _seconds(group: Sequence[ConcurrentTiming]) -> float:
    return (max(timing.arrival_s + timing.token_s[-1] for timing in group)
            - min(timing.arrival_s for timing in group))


def _fairness(group: Sequence[ConcurrentTiming]) -> float:
    speeds = [rate for timing in group if (rate := speed(timing.token_s))]
    return min(speeds) / max(speeds)


SHORT = "answers of at most one token, which prefill yields: they have no speed and are in no rate"


def is_short(sample: Sample) -> bool:
    """Whether an answer has no token after the first, and so no speed."""
    return sample.tokens <= 1 or sample.tokens_per_second is None


def answer_digest(tokens: Sequence[int], finish_reason: str) -> str:
    text = ",".join(map(str, tokens))
    return sha256(f"{text};{finish_reason}".encode()).hexdigest()[:16]


PERIOD, TIMES, SHORTEST = 32, 3, 32
LOOP = (f"at least {SHORTEST} tokens in a row that repeat with a period of at most {PERIOD} tokens, at "
              f"least {TIMES} times over")


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` contain a run as in ``LOOP``."""
    for period in range(1, PERIOD + 1):
        minimum = max(SHORTEST, TIMES * period) - period
        equal = 0  # tokens in a row that are equal to the one a period before
        for earlier, later in zip(tokens, tokens[period:], strict=False):
            equal = equal + 1 if earlier == later else 0
            if equal == minimum:
                return True
    return False
