"""Runs methods × tasks × temperatures on any cluster and checks each token against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowspec_edge.bench.results.report import BenchReport, Difference
from flowspec_edge.bench.results.rows import ReportRow, Sample
from flowspec_edge.bench.run.repetition import repeats_itself
from flowspec_edge.runtime.request import ClusterBackend, Request, Result

PlainDecoding = Callable[[Request], tuple[list[int], str]]  # plain decoding: (tokens, finish reason)
NearTieJudge = Callable[[Request, list[int], str], bool]  # whether near ties explain a text that differs
Advance = Callable[[str], None]  # called before each request with its description


@dataclass(frozen=True)
class Workload:
    """A task's requests; strategy, temperature and repeats come from the plan."""

    task: str
    requests: Sequence[Request]


@dataclass(frozen=True)
class BenchPlan:
    """``repeats``: each adds 1 to the seed.

    ``warmup``: uncounted requests before each strategy's first, in which a cluster loads models and fills
    caches.
    """

    strategies: Sequence[str]
    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    repeats: int = 1
    warmup: int = 0

    def steps(self, report: BenchReport) -> int:
        total, warm, references = 0, set(), {}
        for strategy, temperature, work in self.missing(report):
            repeats = self.repeats_at(temperature, report.clock)
            total += len(work.requests) * repeats
            warm.add(strategy)
            references[work.task, temperature] = len(work.requests) * (repeats if temperature else 1)
        return total + sum(references.values()) + self.warmup * len(warm)

    def missing(self, report: BenchReport) -> list[tuple[str, float, Workload]]:
        """The (strategy, temperature, task) that ``report`` lacks.

        Grouped by strategy, because a cluster may restart processes for the next one: every cache is then
        cold.
        """
        done = report.cells
        return [(strategy, temperature, work) for strategy in self.strategies
                for temperature in self.temperatures for work in self.workloads
                if (strategy, work.task, temperature) not in done]

    def repeats_at(self, temperature: float, clock: str) -> int:
        """1 for greedy decoding in virtual time, which is deterministic."""
        return 1 if temperature == 0 and clock == "virtual" else self.repeats


def measure(cluster: ClusterBackend, plain: PlainDecoding, plan: BenchPlan, report: BenchReport,
            advance: Advance = lambda _: None, save: Callable[[], None] = lambda: None,
            explains: NearTieJudge | None = None) -> None:
    """Add to ``report`` what it lacks of ``plan``.

    ``advance`` is called ``plan.steps(report)`` times, ``save`` after each task of a strategy and at the end.
    A text that differs from plain decoding's counts as identical if ``explains`` returns True.
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
        for key, (repeat, index, request) in zip(keys, jobs, strict=True):
            advance(name)
            result = cluster.generate(replace(request, strategy=name))
            difference = _compare(expected[key], result, Difference(
                name, index, 0, None, None, work.task, temperature, repeat))
            tied = bool(difference and explains and explains(request, result.tokens, result.finish_reason))
            differences += [difference] if difference and not tied else []
            samples.append(_sample(name, work.task, temperature, repeat, index, result,
                                   tied or not difference, tied))
        report.samples += samples  # at the end, so that an interrupted task does not count as measured
        report.differences += differences
        save()
    report.complete = True
    save()


def run(cluster: ClusterBackend, plain: PlainDecoding, requests: Sequence[Request], strategies: Sequence[str],
        advance: Advance = lambda _: None, explains: NearTieJudge | None = None,
        ) -> tuple[list[ReportRow], list[Difference]]:
    """Every strategy on one unnamed task, at the temperature of its requests."""
    report = BenchReport(None, cluster.clock)
    plan = BenchPlan(strategies, [Workload("", requests)], [requests[0].sampling.temperature])
    measure(cluster, plain, plan, report, advance, explains=explains)
    return report.rows, report.differences


def _at(request: Request, temperature: float, repeat: int) -> Request:
    seed = request.sampling.seed + (repeat if temperature else 0)  # greedy decoding needs no seed
    return replace(request, sampling=replace(request.sampling, temperature=temperature, seed=seed))


def _sample(strategy: str, task: str, temperature: float, repeat: int, prompt: int, result: Result,
            identical: bool, tied: bool) -> Sample:
    s = result.stats
    return Sample(
        strategy, task, temperature, repeat, prompt, tokens=len(result.tokens), turns=s.turns,
        rounds=s.rounds, tokens_per_second=s.tokens_per_second, decode_s=s.decode_s, ttft_s=s.ttft_s,
        itl_p50_s=s.itl_p50_s, itl_p95_s=s.itl_p95_s, drafted=s.drafted, verified=s.verified,
        accepted=s.accepted, bytes=s.bytes, identical=identical,
        near_ties=tied, energy_j=s.energy_j, energy_above_idle_j=s.energy_above_idle_j,
        repeating=repeats_itself(result.tokens),
    )


def _compare(expected: tuple[list[int], str], result: Result, where: Difference) -> Difference | None:
    tokens, reason = expected
    if result.tokens == tokens and result.finish_reason == reason:
        return None
    got = result.tokens
    unequal = (i for i, (a, b) in enumerate(zip(tokens, got, strict=False)) if a != b)
    at = next(unequal, min(len(tokens), len(got)))
    return replace(where, position=at, expected=tokens[at] if at < len(tokens) else None,
                   got=got[at] if at < len(got) else None)
