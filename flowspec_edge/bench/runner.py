"""Methods × tasks × temperatures on one cluster, checked token by token against plain decoding.

Knows what is run, in which order, and what of it is already there.  Does not know what kind of
cluster it measures, what becomes of the samples (``report``), nor how they are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from flowspec_edge.bench.report import Difference, Report, Row, Sample
from flowspec_edge.runtime.request import Cluster, Request, Result

Plain = Callable[[Request], tuple[list[int], str]]  # plain decoding: tokens and finish reason
Advance = Callable[[str], None]  # called before each piece of work with what it is
Reference = dict[tuple[int, int], tuple[list[int], str]]  # by (prompt, seed)


@dataclass(frozen=True)
class Workload:
    """A task's requests; the plan decides their strategy, temperature and repeats."""

    task: str
    requests: Sequence[Request]


@dataclass(frozen=True)
class Plan:
    """Everything to be measured.

    ``repeats`` adds 0, 1, … to the seed.  ``warmup`` requests a strategy come first and count for
    nothing: a real cluster's first ones load models and fill caches.
    """

    strategies: Sequence[str]
    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    repeats: int = 1
    warmup: int = 0

    def steps(self, report: Report) -> int:
        """How many requests it takes, plain decoding's among them, beside what ``report`` has."""
        total, warm = 0, set()
        for temperature, work, missing in self.missing(report):
            repeats = self.repeats_at(temperature, report.clock)
            references = repeats if temperature else 1
            total += len(work.requests) * (references + len(missing) * repeats)
            warm |= set(missing)
        return total + self.warmup * len(warm)

    def missing(self, report: Report) -> Iterator[tuple[float, Workload, list[str]]]:
        """For each temperature and task, the strategies that ``report`` lacks."""
        done = report.cells
        for temperature in self.temperatures:
            for work in self.workloads:
                names = [s for s in self.strategies if (s, work.task, temperature) not in done]
                if names:
                    yield temperature, work, names

    def repeats_at(self, temperature: float, clock: str) -> int:
        """Greedy text in made-up time comes out the same every time: once is enough."""
        return 1 if temperature == 0 and clock == "virtual" else self.repeats


def measure(cluster: Cluster, plain: Plain, plan: Plan, report: Report,
            advance: Advance = lambda _: None, save: Callable[[], None] = lambda: None) -> None:
    """Add to ``report`` what it lacks of ``plan``.

    ``advance`` is called ``plan.steps(report)`` times; ``save`` whenever a strategy is through with
    a task, and at the end.
    """
    warm: set[str] = set()
    for temperature, work, names in list(plan.missing(report)):
        repeats = plan.repeats_at(temperature, cluster.clock)
        jobs = [(repeat, index, _at(request, temperature, repeat))
                for repeat in range(repeats) for index, request in enumerate(work.requests)]
        expected: Reference = {}
        for _, index, request in jobs:
            if (index, request.sampling.seed) not in expected:
                advance("plain decoding")
                expected[index, request.sampling.seed] = plain(request)
        for name in names:
            if name not in warm:
                warm.add(name)
                for turn in range(plan.warmup):
                    advance(f"{name}, warm-up")
                    cluster.generate(replace(jobs[turn % len(jobs)][2], strategy=name))
            samples, differences = [], []
            for repeat, index, request in jobs:
                advance(name)
                result = cluster.generate(replace(request, strategy=name))
                difference = _compare(expected[index, request.sampling.seed], result, Difference(
                    name, index, 0, None, None, work.task, temperature, repeat))
                differences += [difference] if difference else []
                samples.append(_sample(name, work.task, temperature, repeat, index, result, not difference))
            report.samples += samples  # only now: an interrupted task must not look finished
            report.differences += differences
            save()
    report.complete = True
    save()


def run(cluster: Cluster, plain: Plain, requests: Sequence[Request], strategies: Sequence[str],
        advance: Advance = lambda _: None) -> tuple[list[Row], list[Difference]]:
    """Every strategy on one nameless task, at the temperature of its requests.

    ``advance`` is called ``len(requests) * (1 + len(strategies))`` times.
    """
    report = Report(None, cluster.clock)
    plan = Plan(strategies, [Workload("", requests)], [requests[0].sampling.temperature])
    measure(cluster, plain, plan, report, advance)
    return report.rows, report.differences


def _at(request: Request, temperature: float, repeat: int) -> Request:
    seed = request.sampling.seed + (repeat if temperature else 0)  # greedy text depends on no seed
    return replace(request, sampling=replace(request.sampling, temperature=temperature, seed=seed))


def _sample(strategy: str, task: str, temperature: float, repeat: int, prompt: int, result: Result,
            identical: bool) -> Sample:
    s = result.stats
    return Sample(
        strategy, task, temperature, repeat, prompt, tokens=len(result.tokens), turns=s.turns,
        rounds=s.rounds, tokens_per_second=s.tokens_per_second, decode_s=s.decode_s, ttft_s=s.ttft_s,
        itl_p50_s=s.itl_p50_s, itl_p95_s=s.itl_p95_s, drafted=s.drafted, verified=s.verified,
        accepted=s.accepted, bytes=s.bytes, identical=identical,
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
