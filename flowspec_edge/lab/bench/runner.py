"""Runs methods × tasks × temperatures on a cluster, and checks each token against plain decoding.

The cluster may be any one, or one for each value of an axis.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from flowspec_edge.d0.request import ClusterBackend, Request, Result, different_tokens
from flowspec_edge.lab.bench.axes import Axis, Value
from flowspec_edge.lab.bench.results import BenchReport, Difference, Results
from flowspec_edge.lab.bench.samples import (
    ConcurrentTiming,
    Sample,
    answer_digest,
    repeats_itself,
    speed,
)
from flowspec_edge.sampling.settings import Sampling

PlainDecoding = Callable[[Request], tuple[list[int], str]]  # plain decoding: (tokens, finish reason)
NearTieJudge = Callable[[Request, list[int], str], bool]  # whether near ties explain a text that differs
Advance = Callable[[str], None]  # called before each request with its description


class PointCluster(NamedTuple):
    """A cluster and the measured bandwidth of each device's link in 10^6 bits a second, or None."""

    cluster: ClusterBackend
    measured_mbps: list[float] | None


OpenPoint = Callable[[Value | None], AbstractContextManager[PointCluster]]  # None: without an axis


@dataclass(frozen=True)
class Workload:
    """A task's requests; strategy, temperature and repeats come from the plan."""

    task: str
    requests: Sequence[Request]


@dataclass(frozen=True)
class BenchPlan:
    """What a benchmark runs.

    repeats  each adds 1 to the seed
    warmup   uncounted requests before each strategy's first, in which a cluster loads models and fills caches
    pattern  how requests arrive that share the devices; None: one by one
    """

    strategies: Sequence[str]
    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    repeats: int = 1
    warmup: int = 0
    pattern: ArrivalPattern | None = None

    def at(self, axis: Axis, value: Value) -> BenchPlan:
        """Return the plan with this value's parameters. UsageError if they are invalid."""
        return replace(self, workloads=[
            Workload(work.task, [replace(request, params=axis.params(request.params, value))
                                 for request in work.requests]) for work in self.workloads])

    def steps(self, report: BenchReport) -> int:
        total, warm, references = 0, set(), {}
        for strategy, temperature, work in self.missing(report):
            repeats = self.repeats_at(temperature, report.clock)
            total += (len(work.requests) + len(self.groups(work, 0))) * repeats
            warm.add(strategy)
            references[work.task, temperature] = len(work.requests) * (repeats if temperature else 1)
        return total + sum(references.values()) + self.warmup * len(warm)

    def missing(self, report: BenchReport) -> list[tuple[str, float, Workload]]:
        """Return the (strategy, temperature, task) that ``report`` lacks.

        Grouped by strategy, because a cluster may restart processes for the next one: every cache is then
        cold.
        """
        cells = report.cells
        return [(strategy, temperature, work) for strategy in self.strategies
                for temperature in self.temperatures for work in self.workloads
                if (strategy, work.task, temperature) not in cells]

    def groups(self, work: Workload, repeat: int) -> list[ArrivalGroup]:
        """Return a task's groups of concurrent requests; none if requests run one by one."""
        if self.pattern is None:
            return []
        seed = work.requests[0].sampling.seed + repeat
        return self.pattern.groups(len(work.requests), seed)

    @property
    def at_once(self) -> int:
        """The most requests that can be open together."""
        if self.pattern is None:
            return 1
        return max(self.pattern.at_once(len(work.requests)) for work in self.workloads)

    def repeats_at(self, temperature: float, clock: str) -> int:
        """Return the repeats: 1 for greedy decoding in virtual time, which is deterministic."""
        return 1 if temperature == 0 and clock == "virtual" else self.repeats


Plans = Mapping[Value, BenchPlan] | Mapping[None, BenchPlan]


def measure(cluster: ClusterBackend, plain: PlainDecoding, plan: BenchPlan, report: BenchReport,
            advance: Advance = lambda _: None, save: Callable[[], None] = lambda: None,
            explains: NearTieJudge | None = None) -> None:
    """Add to ``report`` what it lacks of ``plan``.

    ``advance`` is called ``plan.steps(report)`` times, ``save`` after each task of a strategy and at the end.
    A text that differs from plain decoding's is an error unless ``explains`` returns True.
    """
    warm: set[str] = set()
    expected: dict[tuple[str, float, int, int], tuple[list[int], str]] = {}
    for name, temperature, work in plan.missing(report):
        jobs = [(repeat, index, _at(request, temperature, repeat))
                for repeat in range(plan.repeats_at(temperature, cluster.clock))
                for index, request in enumerate(work.requests)]
        keys = [(work.task, temperature, index, request.sampling.seed) for _, index, request in jobs]
        for key, (_, _, request) in zip(keys, jobs, strict=True):
            if key not in expected:
                advance("plain decoding")
                expected[key] = plain(request)
        if name not in warm:
            warm.add(name)
            for turn in range(plan.warmup):
                advance(f"{name}, warm-up")
                cluster.generate(replace(jobs[turn % len(jobs)][2], strategy=name))
        samples, differences = [], []
        requests = [replace(request, strategy=name) for _, _, request in jobs]
        for answer in _answers(cluster, plan, work, requests, advance):
            repeat, index, request = jobs[answer.member]
            plainly = expected[keys[answer.member]]
            difference, tied = _check(answer, plainly, request, explains, Difference(
                name, index, 0, None, None, work.task, temperature, repeat))
            differences += [difference] if difference else []
            identical = difference is None and not tied
            samples.append(_sample(name, work.task, temperature, repeat, index, answer, plainly[0], identical,
                                   tied))
        report.samples += samples  # at the end, so that an interrupted task does not count as measured
        report.differences += differences
        save()
    report.complete = True
    save()


def steps(results: Results, plans: Plans) -> int:
    return sum(plan.steps(results.point(value).report) for value, plan in plans.items())


def measure_points(results: Results, plans: Plans, open_point: OpenPoint, plain: PlainDecoding,
                   advance: Advance = lambda _: None, save: Callable[[], None] = lambda: None,
                   explains: NearTieJudge | None = None) -> None:
    """Add to ``results`` what they lack of ``plans``, value by value in their order.

    Complete values are not opened.  ``advance`` is called ``steps`` times; ``save`` and ``explains`` as in
    :func:`measure`.
    """
    results.complete = False
    expected = cached(plain)
    for value, plan in plans.items():
        point, label = results.point(value), results.label_of(value)
        if not plan.missing(point.report):
            continue

        def advance_here(step: str, label: str = f"{label}: " if label else "") -> None:
            advance(f"{label}{step}")

        with open_point(value) as (cluster, point.measured_mbps):
            measure(cluster, expected, plan, point.report, advance_here, save, explains)
    results.complete = True
    save()


def cached(plain: PlainDecoding) -> PlainDecoding:
    """Plain decoding that runs each request once: no axis changes the text."""
    answers: dict[tuple[tuple[int, ...], int, Sampling, frozenset[int]], tuple[list[int], str]] = {}

    def answer(request: Request) -> tuple[list[int], str]:
        key = tuple(request.prompt), request.max_new_tokens, request.sampling, request.stop_ids
        if key not in answers:
            answers[key] = plain(request)
        return answers[key]

    return answer


def _at(request: Request, temperature: float, repeat: int) -> Request:
    seed = request.sampling.seed + (repeat if temperature else 0)  # greedy decoding needs no seed
    return replace(request, sampling=replace(request.sampling, temperature=temperature, seed=seed))


def _answers(cluster: ClusterBackend, plan: BenchPlan, work: Workload, requests: Sequence[Request],
             advance: Advance) -> Iterator[MeasuredAnswer]:
    """Run ``requests``, all repeats of a task by one strategy, and yield their answers."""
    name, size = requests[0].strategy, len(work.requests)
    if plan.pattern is None:
        for member, request in enumerate(requests):
            advance(name)
            yield MeasuredAnswer(member, cluster.generate(request))
        return
    groups = [replace(group, members=[first + member for member in group.members])
              for repeat, first in enumerate(range(0, len(requests), size))
              for group in plan.groups(work, repeat)]
    yield from run_groups(cluster, requests, plan.pattern, groups, lambda step: advance(f"{name}, {step}"))


def _check(answer: MeasuredAnswer, expected: tuple[list[int], str], request: Request,
           explains: NearTieJudge | None, template: Difference) -> tuple[Difference | None, bool]:
    """Return the difference from plain decoding's text, and whether there is one that near ties explain."""
    tied = False
    for result in filter(None, (answer.alone, answer.result)):
        difference = _compare(expected, result, template)
        if difference and not (explains and explains(request, result.tokens, result.finish_reason)):
            return difference, False
        tied |= difference is not None
    return None, tied


def _sample(strategy: str, task: str, temperature: float, repeat: int, prompt: int, answer: MeasuredAnswer,
            expected: Sequence[int], identical: bool, tied: bool) -> Sample:
    result, timing = answer.result, answer.timing
    s = result.stats
    return Sample(
        strategy, task, temperature, repeat, prompt, tokens=len(result.tokens), turns=s.turns,
        rounds=s.rounds, tokens_per_second=s.tokens_per_second, decode_s=s.decode_s,
        ttft_s=timing.token_s[0] if timing and timing.token_s else s.ttft_s,  # with the wait for a session
        itl_p50_s=s.itl_p50_s, itl_p95_s=s.itl_p95_s, drafted=s.drafted, verified=s.verified,
        accepted=s.accepted, bytes=s.bytes, identical=identical,
        near_ties=tied, energy_j=s.energy_j, energy_above_idle_j=s.energy_above_idle_j,
        repeating=repeats_itself(result.tokens), concurrent=timing,
        draft=s.draft, answer=answer_digest(result.tokens, result.finish_reason), prompt_chunk=s.prompt_chunk,
        different_tokens=max(different_tokens(timed.tokens, expected)
                             for timed in (answer.alone, result) if timed),
    )


def _compare(expected: tuple[list[int], str], result: Result, template: Difference) -> Difference | None:
    tokens, reason = expected
    if result.tokens == tokens and result.finish_reason == reason:
        return None
    actual = result.tokens
    unequal = (i for i, (a, b) in enumerate(zip(tokens, actual, strict=False)) if a != b)
    at = next(unequal, min(len(tokens), len(actual)))
    return replace(template, position=at, expected=tokens[at] if at < len(tokens) else None,
                   got=actual[at] if at < len(actual) else None)


@dataclass(frozen=True)
class ArrivalGroup:
    """Requests that run concurrently: their indexes and, in the same order, the seconds of their arrivals."""

    members: list[int]
    arrivals: list[float]


@dataclass(frozen=True)
class ArrivalPattern:
    """How requests arrive: in groups of ``clients`` together, or ``rate`` a second.

    A rate is that of a Poisson process, whatever the devices achieve.
    """

    clients: int | None = None
    rate: float | None = None

    def groups(self, requests: int, seed: int) -> list[ArrivalGroup]:
        """Return the last group of clients is filled up with the first requests.

        ``seed`` draws the arrivals; the first one is at 0.
        """
        if self.rate is not None:
            gaps = random.Random(seed)
            arrivals = accumulate((gaps.expovariate(self.rate) for _ in range(1, requests)), initial=0.0)
            return [ArrivalGroup(list(range(requests)), list(arrivals))]
        assert self.clients is not None
        return [ArrivalGroup([(first + i) % requests for i in range(self.clients)], [0.0] * self.clients)
                for first in range(0, requests, self.clients)]

    def at_once(self, requests: int) -> int:
        """Return how many of ``requests`` requests can be open together at most."""
        return self.clients or requests


@dataclass(frozen=True)
class MeasuredAnswer:
    """An answer with its times.

    ``member``: the request's index; ``alone``, ``timing``: of a request that ran beside others.
    """

    member: int
    result: Result
    alone: Result | None = None
    timing: ConcurrentTiming | None = None


def run_groups(cluster: ClusterBackend, requests: Sequence[Request], pattern: ArrivalPattern,
               groups: Sequence[ArrivalGroup], advance: Callable[[str], None]) -> Iterator[MeasuredAnswer]:
    """Run every request alone, then the groups one after the other.

    ``advance`` is called before each of these runs, with its description.
    """
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
