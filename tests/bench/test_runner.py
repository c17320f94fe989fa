"""Rows of the table: recomputed from single results, and a cluster that errs is found out."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_dir import tiny_model_dir

from flowspec_edge.bench.runner import run
from flowspec_edge.bench.table import table, title
from flowspec_edge.config import load_profile
from flowspec_edge.runtime.plain import PlainDecoder
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.runtime.virtual import VirtualCluster

STRATEGIES = ("autoregressive", "chunk_pp", "flowspec")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32)


@pytest.fixture
def cluster(model: Path) -> Iterator[VirtualCluster]:
    made = VirtualCluster(model, 2, load_profile("paper-7b"))
    yield made
    made.close()


@pytest.fixture
def requests() -> list[Request]:
    return [Request([5, 9, 20], max_new_tokens=8), Request([7] * 5, max_new_tokens=5),
            Request([31, 4], max_new_tokens=1)]


class Plain:
    def __init__(self, model: Path) -> None:
        self.decoder = PlainDecoder(model)

    def __call__(self, request: Request) -> tuple[list[int], str]:
        return self.decoder.generate(list(request.prompt), request.max_new_tokens, request.sampling,
                                     request.stop_ids)


class Erring:
    """A cluster that changes what another one says."""

    clock = "virtual"

    def __init__(self, cluster: VirtualCluster, strategy: str, change: str) -> None:
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


def test_rows_are_means_and_ratios_of_sums(model: Path, cluster: VirtualCluster,
                                           requests: list[Request]) -> None:
    seen: list[str] = []
    rows, differences = run(cluster, Plain(model), requests, STRATEGIES, seen.append)
    assert differences == []
    assert len(seen) == len(requests) * (1 + len(STRATEGIES))
    speeds = {}
    for row in rows:
        results = [cluster.generate(replace(r, strategy=row.strategy)) for r in requests]
        speeds[row.strategy] = sum(r.stats.tokens_per_second for r in results) / 3
        assert row.tokens_per_second == pytest.approx(speeds[row.strategy])
        assert (row.tokens, row.identical) == (8 + 5 + 1, True)
        assert row.turns == pytest.approx(sum(r.stats.turns for r in results))
        assert row.rounds == sum(r.stats.rounds for r in results)
        assert row.alt == pytest.approx((7 + 4) / row.turns)
        assert row.alr == pytest.approx((7 + 4) / row.rounds)
    for row in rows:
        assert row.speedup == pytest.approx(speeds[row.strategy] / speeds["chunk_pp"])


def test_one_request_is_the_clusters_own_figures(model: Path, cluster: VirtualCluster,
                                                 requests: list[Request]) -> None:
    (row,), _ = run(cluster, Plain(model), requests[:1], ["flowspec"])
    stats = cluster.generate(requests[0]).stats
    assert (row.turns, row.rounds) == (stats.turns, stats.rounds)
    assert (row.tokens_per_second, row.alt, row.alr) == pytest.approx(
        (stats.tokens_per_second, stats.alt, stats.alr))


def test_without_chunk_pp_there_is_no_speedup(model: Path, cluster: VirtualCluster,
                                              requests: list[Request]) -> None:
    rows, _ = run(cluster, Plain(model), requests[:1], ["flowspec"])
    assert rows[0].speedup is None


@pytest.mark.parametrize(("change", "position"), [("wrong", 3), ("short", 4), ("reason", 5)])
def test_a_difference_is_found_and_placed(model: Path, cluster: VirtualCluster, requests: list[Request],
                                          change: str, position: int) -> None:
    rows, differences = run(Erring(cluster, "chunk_pp", change), Plain(model), requests, STRATEGIES)
    assert [row.identical for row in rows] == [True, False, True]
    (difference,) = differences
    assert (difference.strategy, difference.prompt, difference.position) == ("chunk_pp", 1, position)
    assert str(difference).startswith(f"chunk_pp, prompt 1: token {position} is ")


def test_the_table_says_what_the_figures_are(model: Path, cluster: VirtualCluster,
                                             requests: list[Request]) -> None:
    rows, _ = run(Erring(cluster, "flowspec", "wrong"), Plain(model), requests, STRATEGIES)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(rows, title("virtual", "paper-7b", 2, 0.0)))
    text = console.export_text()
    assert "VIRTUAL TIME under paper-7b, 2 stages, T = 0" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["flowspec"].rstrip().endswith("DIFFERENT")
    assert lines["chunk_pp"].rstrip().endswith("identical")
    assert "1.00×" in lines["chunk_pp"]
    assert "…" not in text
