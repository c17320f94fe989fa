"""Figures of requests that share the devices: each one's times, and what a row computes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, quantiles


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
    """Of a row. A request's speed is :func:`speed`; figures are None without an answer that has one.

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
    """Tokens over the time from the request's arrival to the last of them, prefill and waiting included; None
    without tokens."""
    return len(token_s) / token_s[-1] if token_s else None


def figures_of(timings: Sequence[ConcurrentTiming]) -> ConcurrencyFigures:
    groups: dict[int, list[ConcurrentTiming]] = {}
    for timing in timings:
        if timing.token_s:
            groups.setdefault(timing.group, []).append(timing)
    shares = [own / alone for timing in timings
              if (own := speed(timing.token_s)) and (alone := timing.alone_tokens_per_second)]
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
    """Over tasks: means; of shares and fairness the lowest."""
    def over_tasks(combine: Callable[[Iterable[float]], float], name: str) -> float | None:
        found = [value for part in parts if (value := getattr(part, name)) is not None]
        return combine(found) if found else None

    return ConcurrencyFigures(
        parts[0].clients, parts[0].arrival_rate, over_tasks(fmean, "total_tokens_per_second"),
        over_tasks(min, "slowest_share"), over_tasks(min, "fairness"), over_tasks(fmean, "pooled_itl_p50_s"),
        over_tasks(fmean, "pooled_itl_p95_s"), over_tasks(fmean, "pooled_itl_p99_s"))


def _seconds(group: Sequence[ConcurrentTiming]) -> float:
    return (max(timing.arrival_s + timing.token_s[-1] for timing in group)
            - min(timing.arrival_s for timing in group))


def _fairness(group: Sequence[ConcurrentTiming]) -> float:
    speeds = [own for timing in group if (own := speed(timing.token_s))]
    return min(speeds) / max(speeds)
