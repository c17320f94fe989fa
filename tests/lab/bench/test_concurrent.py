"""Figures of requests beside one another, recomputed from what an observer saw; arrivals; differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from kits.requests import answer, plain, plain_answers

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Request, Result
from flowspec_edge.d0.run_events import DraftDeviceWork, RunEvent, SessionOpened
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.results import BenchReport
from flowspec_edge.lab.bench.runner import ArrivalPattern, BenchPlan, Workload, measure

REQUESTS = [Request([5, 9, 20], max_new_tokens=9), Request([7] * 20, max_new_tokens=5),
            Request([31, 4], max_new_tokens=7)]
LENGTHS = [9, 5, 7]


class Notes(Observer):
    """When each session's request arrived, and when its text had grown."""

    def __init__(self) -> None:
        self.opened_at: dict[int, float] = {}
        self.requests: dict[int, Request] = {}
        self.token_at: dict[int, list[float]] = defaultdict(list)

    def observe(self, event: RunEvent) -> None:
        match event:
            case SessionOpened():
                self.opened_at[event.session] = event.at
                self.requests[event.session] = event.request
            case DraftDeviceWork():
                self.token_at[event.session] += [event.at] * len(event.tokens)


def measured(model: Path, cluster: VirtualCluster | Changed, pattern: ArrivalPattern,
             strategy: str = "flowspec", temperature: float = 0.0, repeats: int = 1) -> BenchReport:
    seen: list[str] = []
    plan = BenchPlan([strategy], [Workload("t", REQUESTS)], [temperature], repeats, pattern=pattern)
    report = BenchReport("paper-7b", "virtual")
    steps = plan.steps(report)
    measure(cluster, plain_answers(model), plan, report, seen.append)
    assert len(seen) == steps
    return report


@pytest.mark.parametrize(("pattern", "groups"), [
    (ArrivalPattern(clients=2), [[0, 1], [2, 0]]), (ArrivalPattern(rate=0.7), [[0, 1, 2]])],
    ids=["clients", "rate"])
def test_figures_are_those_of_an_observer(model: Path, pattern: ArrivalPattern, groups: list[list[int]]
                                          ) -> None:
    notes = Notes()
    report = measured(model, VirtualCluster(model, 2, load_profile("paper-7b"), observer=notes), pattern)
    (row,) = report.rows
    figures = row.concurrency
    assert figures is not None
    assert (row.identical, figures.clients, figures.arrival_rate) == (True, pattern.clients, pattern.rate)

    sessions = list(notes.opened_at)
    alone, rest = sessions[:3], iter(sessions[3:])

    def seconds(session: int) -> float:
        return notes.token_at[session][-1] - notes.opened_at[session]

    tokens, total_s, shares, fairness, first, gaps = 0, 0.0, [], [], [], []
    for group in groups:
        mine = [next(rest) for _ in group]
        assert [notes.requests[session].prompt for session in mine] == [REQUESTS[i].prompt for i in group]
        assert [len(notes.token_at[session]) for session in mine] == [LENGTHS[i] for i in group]
        tokens += sum(LENGTHS[i] for i in group)
        total_s += max(notes.token_at[s][-1] for s in mine) - min(notes.opened_at[s] for s in mine)
        shares += [seconds(alone[i]) / seconds(session) for i, session in zip(group, mine, strict=True)]
        speeds = [LENGTHS[i] / seconds(session) for i, session in zip(group, mine, strict=True)]
        fairness.append(min(speeds) / max(speeds))
        first += [notes.token_at[session][0] - notes.opened_at[session] for session in mine]
        gaps += [gap for session in mine for gap in np.diff(notes.token_at[session])]
    assert next(rest, None) is None
    assert min(shares) < 0.99  # they disturbed one another
    assert figures.total_tokens_per_second == pytest.approx(tokens / total_s)
    assert figures.slowest_share == pytest.approx(min(shares))
    assert figures.fairness == pytest.approx(min(fairness))
    assert row.ttft_s == pytest.approx(mean(first))
    assert [figures.pooled_itl_p50_s, figures.pooled_itl_p95_s, figures.pooled_itl_p99_s] == pytest.approx(
        np.percentile(gaps, [50, 95, 99]))


def test_one_client_is_as_fast_as_alone_and_repeats_count(model: Path) -> None:
    cluster = VirtualCluster(model, 2, load_profile("paper-7b"))
    report = measured(model, cluster, ArrivalPattern(clients=1), "chunk_pp", 1.0, repeats=2)
    assert [(s.repeat, s.prompt) for s in report.samples] == [(r, i) for r in (0, 1) for i in (0, 1, 2)]
    (row,) = report.rows
    assert row.concurrency is not None
    assert (row.identical, row.repeats) == (True, 2)
    assert row.concurrency.slowest_share == pytest.approx(1.0)
    assert row.concurrency.fairness == 1.0


class Changed:
    """A cluster that returns a wrong token where so many requests are concurrent."""

    clock = "virtual"

    def __init__(self, cluster: VirtualCluster, concurrent: int) -> None:
        self.cluster, self.concurrent = cluster, concurrent
        self.generate, self.close = cluster.generate, cluster.close

    def generate_many(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None
                      ) -> list[Result]:
        *others, last = self.cluster.generate_many(requests, arrivals)
        if len(requests) != self.concurrent or len(last.tokens) != 5:
            return [*others, last]
        return [*others, replace(last, tokens=[*last.tokens[:4], last.tokens[4] + 1])]


@pytest.mark.parametrize("concurrent", [1, 2], ids=["alone", "together"])
def test_a_text_that_differs_alone_or_beside_others_is_found(model: Path, concurrent: int) -> None:
    cluster = Changed(VirtualCluster(model, 2, load_profile("paper-7b")), concurrent)
    report = measured(model, cluster, ArrivalPattern(clients=2), "autoregressive")
    assert [(d.prompt, d.position) for d in report.differences] == [(1, 4)]
    assert [sample.identical for sample in report.samples] == [True, False, True, True]


def test_arrivals_are_random_and_follow_from_the_seed() -> None:
    (group,) = ArrivalPattern(rate=4.0).groups(4000, seed=3)
    gaps = np.diff(group.arrivals)
    assert group.members == list(range(4000))
    assert (group.arrivals[0], min(gaps) >= 0) == (0.0, True)
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.1)  # exponential: the deviation is the mean
    assert ArrivalPattern(rate=4.0).groups(4000, seed=3) == [group]
    assert ArrivalPattern(rate=4.0).groups(4000, seed=4) != [group]


def test_every_group_is_full() -> None:
    groups = ArrivalPattern(clients=4).groups(6, seed=0)
    assert [group.members for group in groups] == [[0, 1, 2, 3], [4, 5, 0, 1]]
    assert ArrivalPattern(clients=3).groups(2, seed=0)[0].members == [0, 1, 0]


@pytest.mark.slow
def test_processes_take_requests_when_they_arrive(model: Path) -> None:
    with open_cluster(ClusterSpec(model, 2)) as cluster:
        with pytest.raises(UsageError, match="galaxy exists in virtual time only"):
            cluster.generate_many([REQUESTS[0], replace(REQUESTS[0], strategy="galaxy")])
        assert cluster.generate_many([]) == []
        results = cluster.generate_many(REQUESTS, [0.6, 0.0, 0.6])
    for request, result, arrival in zip(REQUESTS, results, [0.6, 0.0, 0.6], strict=True):
        assert result.tokens == answer(plain(model), request)[0]
        assert len(result.token_at) == len(result.tokens)
        assert list(result.token_at) == sorted(result.token_at)
        assert result.token_at[0] > arrival
