"""Rows recomputed from single results; texts that differ are reported; reports are resumed."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from kits.requests import plain_answers
from rich.console import Console

from flowspec_edge.d0.request import ClusterBackend, OnTokens, Request, Result
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.bench.results import BenchReport, Difference, load_report
from flowspec_edge.lab.bench.rows import ReportRow
from flowspec_edge.lab.bench.runner import Advance, BenchPlan, PlainDecoding, Workload, measure
from flowspec_edge.lab.bench.tables import show, table, title
from flowspec_edge.sampling.rule import Sampling

STRATEGIES = ("autoregressive", "chunk_pp", "flowspec")


@pytest.fixture
def cluster(model: Path) -> Iterator[VirtualCluster]:
    made = VirtualCluster(model, 2, load_profile("paper-7b"))
    yield made
    made.close()


@pytest.fixture
def requests() -> list[Request]:
    return [Request([5, 9, 20], max_new_tokens=8), Request([7] * 5, max_new_tokens=5),
            Request([31, 4], max_new_tokens=1)]


def run(cluster: ClusterBackend, plain: PlainDecoding, requests: Sequence[Request], strategies: Sequence[str],
        advance: Advance = lambda _: None) -> tuple[list[ReportRow], list[Difference]]:
    """Every strategy on one unnamed task, at temperature 0."""
    report = BenchReport(None, cluster.clock)
    measure(cluster, plain, BenchPlan(strategies, [Workload("", requests)], [0.0]), report, advance)
    return report.rows, report.differences


class Remembering:
    """A cluster that answers a request which it has had with the same result, in no time."""

    clock = "virtual"

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.results: dict[str, Result] = {}

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        asked = repr((request.prompt, request.strategy, request.sampling, request.max_new_tokens))
        if asked not in self.results:
            self.results[asked] = self.cluster.generate(request)
        return self.results[asked]

    def close(self) -> None:
        self.cluster.close()


@pytest.fixture(scope="module")
def remembering(model: Path) -> Iterator[Remembering]:
    """For tests of what a report makes of results."""
    with closing(Remembering(VirtualCluster(model, 2, load_profile("paper-7b")))) as made:
        yield made


class Erring:
    """A cluster that changes the results of another one."""

    clock = "virtual"

    def __init__(self, cluster: Remembering, strategy: str, change: str) -> None:
        self.cluster, self.strategy, self.change = cluster, strategy, change

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        result = self.cluster.generate(request, on_tokens)
        if request.strategy != self.strategy or len(result.tokens) != 5:
            return result
        match self.change:
            case "wrong":
                return replace(result, tokens=[*result.tokens[:3], result.tokens[3] + 1, result.tokens[4]])
            case "short":
                return replace(result, tokens=result.tokens[:4])
            case _:
                return replace(result, finish_reason="stop")

    def close(self) -> None:
        self.cluster.close()


@pytest.mark.parametrize(("change", "position"), [("wrong", 3), ("short", 4), ("reason", 5)])
def test_a_difference_is_found_and_placed(model: Path, remembering: Remembering, requests: list[Request],
                                          change: str, position: int) -> None:
    rows, differences = run(Erring(remembering, "chunk_pp", change), plain_answers(model), requests, STRATEGIES)
    assert [row.identical for row in rows] == [True, False, True]
    (difference,) = differences
    assert (difference.strategy, difference.prompt, difference.position) == ("chunk_pp", 1, position)
    assert str(difference).startswith(f"chunk_pp, prompt 1: token {position} is ")


def plan(requests: list[Request], strategies: tuple[str, ...] = STRATEGIES, repeats: int = 1,
         warmup: int = 0) -> BenchPlan:
    work = [Workload("first", requests[:2]), Workload("second", requests[1:2])]
    return BenchPlan(strategies, work, [0.0, 1.0], repeats, warmup)


@pytest.mark.slow
def test_rows_are_the_clusters_own_figures(
        model: Path, cluster: VirtualCluster, requests: list[Request]) -> None:
    asked, report, seen = plan(requests, ("chunk_pp", "flowspec"), repeats=3), BenchReport("p", "virtual"), []
    steps = asked.steps(report)
    measure(cluster, plain_answers(model), asked, report, seen.append)
    # Three prompts: once each when greedy, three times when sampling; plain decoding as often.
    assert len(seen) == steps == 3 * (1 + 2) + 9 * (1 + 2)
    assert report.complete
    assert report.differences == []
    rows = {(row.strategy, row.task, row.temperature): row for row in report.rows}
    assert len(rows) == 2 * 2 * 2
    for (strategy, task, temperature), row in rows.items():
        speeds = []
        for seed in range(3 if temperature else 1):
            sampling = Sampling(temperature, seed=seed)
            results = [cluster.generate(replace(r, strategy=strategy, sampling=sampling))
                       for r in (requests[:2] if task == "first" else requests[1:2])]
            speeds.append(mean(r.stats.tokens_per_second for r in results))
        assert row.tokens_per_second == pytest.approx(mean(speeds))
        assert row.repeats == len(speeds)
        if temperature:
            assert row.tokens_per_second_sd == pytest.approx(stdev(speeds))
        else:
            assert row.tokens_per_second_sd is None
        assert row.ttft_s == pytest.approx(mean(r.stats.ttft_s for r in results))
    texts = {s.tokens_per_second for s in report.samples if s.temperature and s.task == "second"}
    assert len(texts) > 2  # the repeats are not the same text three times


def test_a_difference_names_task_temperature_and_repeat(model: Path, remembering: Remembering,
                                                        requests: list[Request]) -> None:
    asked, report = plan(requests, ("chunk_pp", "flowspec"), repeats=2), BenchReport("p", "virtual")
    measure(Erring(remembering, "flowspec", "wrong"), plain_answers(model), asked, report)
    assert {d.strategy for d in report.differences} == {"flowspec"}
    wrong = {(d.task, d.temperature, d.repeat) for d in report.differences}
    assert {("first", 0.0, 0), ("second", 0.0, 0)} <= wrong
    assert {(s.task, s.temperature, s.repeat) for s in report.samples if not s.identical} == wrong
    assert str(report.differences[0]).startswith("flowspec, first at T = 0, repeat 0, prompt 1: token 3 is ")


@pytest.mark.slow
def test_warming_up_is_not_counted(model: Path, cluster: VirtualCluster, requests: list[Request]) -> None:
    cold, warm, seen = BenchReport("p", "virtual"), BenchReport("p", "virtual"), []
    measure(cluster, plain_answers(model), plan(requests), cold)
    asked = plan(requests, warmup=3)
    steps = asked.steps(warm)
    measure(cluster, plain_answers(model), asked, warm, seen.append)
    assert len(seen) == steps
    assert [seen.count(f"{name}, warm-up") for name in STRATEGIES] == [3, 3, 3]
    assert warm.samples == cold.samples


class Interrupted:
    """A cluster that is interrupted at its n-th request."""

    clock = "virtual"

    def __init__(self, cluster: VirtualCluster, n: int) -> None:
        self.cluster, self.left = cluster, n

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.cluster.generate(request, on_tokens)

    def close(self) -> None:
        self.cluster.close()


@pytest.mark.slow
def test_an_interrupted_report_is_resumed(model: Path, cluster: VirtualCluster, tmp_path: Path,
                                         requests: list[Request]) -> None:
    settings = {"model": "m", "tasks": [], "stages": 2, "draft": "own", "pipedec_width": 1,
                "max_new_tokens": 8, "dtype": "fp32", "seed": 0}
    whole, path = BenchReport("p", "virtual", settings), tmp_path / "r.json"
    measure(cluster, plain_answers(model), plan(requests), whole)

    part = BenchReport("p", "virtual", settings)
    with pytest.raises(KeyboardInterrupt):  # in the first strategy, at its second temperature
        measure(Interrupted(cluster, 4), plain_answers(model), plan(requests), part, save=lambda: part.save(path))
    kept = load_report(path)
    assert not kept.complete
    assert kept.cells == {("autoregressive", "first", 0.0), ("autoregressive", "second", 0.0)}
    assert kept.samples == whole.samples[:3]

    done: list[str] = []
    steps = plan(requests).steps(kept)
    measure(cluster, plain_answers(model), plan(requests), kept, done.append)
    assert len(done) == steps == plan(requests).steps(BenchReport("p", "virtual")) - 3
    assert kept.as_json() == whole.as_json()
    assert plan(requests).steps(kept) == 0


def test_the_table_has_a_caption_and_all_figures(model: Path, remembering: Remembering,
                                                 requests: list[Request]) -> None:
    rows, _ = run(Erring(remembering, "flowspec", "wrong"), plain_answers(model), requests, STRATEGIES)
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, table(rows, title("virtual", "paper-7b", 2, 0.0)))
    text = console.export_text()
    assert "VIRTUAL TIME under paper-7b, 2 stages, T = 0" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert re.search(r" 1/3 ≠ +\d+/14\s*$", lines["flowspec"])
    assert re.search(r" 0/3 +0/14\s*$", lines["chunk_pp"])
    assert "1.00×" in lines["chunk_pp"]
    assert "…" not in text
