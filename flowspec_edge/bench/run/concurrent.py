"""Requests that share the devices: when each arrives, and its run beside the others and alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from flowspec_edge.bench.results.concurrency import ConcurrentTiming, speed
from flowspec_edge.runtime.request import ClusterBackend, Request, Result


@dataclass(frozen=True)
class ArrivalGroup:
    """Requests that run concurrently: their indexes and, in the same order, the seconds of their arrivals."""

    members: list[int]
    arrivals: list[float]


@dataclass(frozen=True)
class ArrivalPattern:
    """Groups of ``clients`` requests that arrive together, or ``rate`` requests a second (a Poisson process,
    whatever the devices achieve)."""

    clients: int | None = None
    rate: float | None = None

    def groups(self, requests: int, seed: int) -> list[ArrivalGroup]:
        """The last group of clients is filled up with the first requests. ``seed`` is of the arrivals; the
        first one is at 0."""
        if self.rate is not None:
            gaps = random.Random(seed)
            arrivals = accumulate((gaps.expovariate(self.rate) for _ in range(1, requests)), initial=0.0)
            return [ArrivalGroup(list(range(requests)), list(arrivals))]
        assert self.clients is not None
        return [ArrivalGroup([(first + i) % requests for i in range(self.clients)], [0.0] * self.clients)
                for first in range(0, requests, self.clients)]

    def at_once(self, requests: int) -> int:
        """The most of so many requests that can be open together."""
        return self.clients or requests


@dataclass(frozen=True)
class MeasuredAnswer:
    """``member``: the request's index; ``alone``, ``timing``: of a request that ran beside others."""

    member: int
    result: Result
    alone: Result | None = None
    timing: ConcurrentTiming | None = None


def run_groups(cluster: ClusterBackend, requests: Sequence[Request], pattern: ArrivalPattern,
               groups: Sequence[ArrivalGroup], advance: Callable[[str], None]) -> Iterator[MeasuredAnswer]:
    """Run every request alone, then the groups one after the other. ``advance`` is called before each of
    these runs, with its description."""
    alone = []
    for request in requests:
        advance("alone")
        alone += cluster.generate_many([request])
    for number, group in enumerate(groups):
        advance(f"{len(group.members)} requests")
        results = cluster.generate_many([requests[member] for member in group.members], group.arrivals)
        for member, arrival, result in zip(group.members, group.arrivals, results, strict=True):
            timing = ConcurrentTiming(pattern.clients, pattern.rate, number, arrival,
                                      tuple(at - arrival for at in result.token_at),
                                      speed(alone[member].token_at))
            yield MeasuredAnswer(member, result, alone[member], timing)
