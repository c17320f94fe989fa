"""An answer without a second token has no speed: it is in no figure, and is counted."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
from kits.bench_reports import measured, report

from flowspec_edge.d0.generation import Generation
from flowspec_edge.d0.request import Request
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench import estimates
from flowspec_edge.lab.bench.axes import AXES
from flowspec_edge.lab.bench.plots import plot, plot_sweep
from flowspec_edge.lab.bench.results import Sweep, load_report
from flowspec_edge.lab.bench.rows import rows_of, task_means
from flowspec_edge.lab.bench.samples import Sample
from flowspec_edge.lab.bench.tables import sweep_notes, sweep_tables
from flowspec_edge.lab.reproduce.catalogue import ARTEFACTS
from flowspec_edge.lab.reproduce.documents import document_of, write_all
from flowspec_edge.strategies.base import TokenCounters
from flowspec_edge.tree.draft_api import Commit

RATES = ("tokens_per_second", "tokens_per_second_median", "tokens_per_second_se", "speedup", "speedup_median",
         "alt", "alr", "itl_mean_s", "itl_p50_s", "itl_p95_s")


def emptied(samples: list[Sample], tokens: int = 0) -> list[Sample]:
    """Answers of the end of the text alone, or of one token."""
    return [replace(s, tokens=tokens, tokens_per_second=None, decode_s=0.0, turns=0.0, rounds=0,
                    itl_p50_s=None, itl_p95_s=None, repeating=False) for s in samples]


@pytest.mark.parametrize("tokens", [0, 1])
def test_figures_of_short_answers_alone_do_not_exist(tokens: int) -> None:
    made = report(["chunk_pp", "flowspec"], ["a", "b"], [0.0])
    made.samples = emptied(made.samples, tokens)
    for row in (*made.rows, *made.means):
        assert [getattr(row, name) for name in RATES] == [None] * len(RATES)
        assert (row.short, row.tokens) == (row.answers, tokens * row.answers)
        assert (row.ttft_s is None) == (tokens == 0)


def test_short_answers_are_counted_and_change_no_figure() -> None:
    made = report(["chunk_pp", "flowspec"], ["a"], [0.0], prompts=5)
    more = report(["chunk_pp", "flowspec"], ["a"], [0.0], prompts=2, seed=1)
    added = [replace(s, prompt=s.prompt + 5) for s in emptied(more.samples)]
    for before, after in zip(rows_of(made.samples), rows_of([*made.samples, *added]), strict=True):
        assert [getattr(after, name) for name in RATES] == [getattr(before, name) for name in RATES]
        assert (after.answers, after.short, before.short) == (7, 2, 0)


def test_medians_are_over_prompts_and_their_own_ratios() -> None:
    made = report(["chunk_pp", "flowspec"], ["a", "b"], [0.0], prompts=4)
    speeds = {(s.strategy, s.task, s.prompt): s.tokens_per_second for s in made.samples}
    places = [(task, prompt) for task in "ab" for prompt in range(4)]
    [_, flowspec] = task_means(made.samples)
    ours, theirs = ([speeds[(method, *place)] or 0.0 for place in places]
                    for method in ("flowspec", "chunk_pp"))
    assert flowspec.tokens_per_second_median == pytest.approx(median(map(float, ours)))
    assert flowspec.speedup_median == pytest.approx(median(a / b for a, b in zip(ours, theirs, strict=True)))
    [row] = [row for row in made.rows if (row.strategy, row.task) == ("flowspec", "b")]
    assert row.tokens_per_second == pytest.approx(fmean(map(float, ours[4:])))
    assert row.speedup_median == pytest.approx(
        median(a / b for a, b in zip(ours[4:], theirs[4:], strict=True)))


def test_nothing_has_no_mean() -> None:
    assert estimates.mean([]) is estimates.ratio([], []) is estimates.ratio([1.0], [0.0]) is None
    assert estimates.average([]) is estimates.average([None]) is None
    assert estimates.speed([]) is estimates.per_turn([]) is estimates.speedup([], []) is None


@pytest.mark.parametrize("committed", [[], [5]])
def test_a_request_of_at_most_one_token_has_no_rate(committed: list[int]) -> None:
    now = iter(range(100))
    generation = Generation(Request([1], stop_ids=frozenset({9})), lambda: float(next(now)))
    generation.prefilled()
    generation.extend([Commit(token, False) for token in (*committed, 9)], [])
    stats = generation.result(TokenCounters(), 0, 0.5, 0, (), 0, "none", 0).stats
    assert [stats.tokens_per_second, stats.alt, stats.alr, stats.itl_p50_s, stats.itl_p95_s] == [None] * 5


@pytest.mark.parametrize("name", ["flowspec-table-3", "flowspec-table-2", "flowspec-figure-5",
                                  "flowspec-figure-6", "pipedec-stages", "spd-law", "methods"])
def test_a_papers_table_of_short_answers_has_no_figure(tmp_path: Path, name: str) -> None:
    artefact = ARTEFACTS[name]
    found = [measured(measurement, ["demo"], emptied) for measurement in artefact.measurements]
    document = document_of(artefact, found, "flowspec reproduce")
    paths = {path.suffix: path for path in write_all(artefact, found, document, tmp_path)}
    assert {path.stat().st_size > 0 for path in paths.values()} == {True}
    rows = list(csv.DictReader(line for line in paths[".csv"].read_text().splitlines() if line[0] != "#"))
    ours = [row for row in rows if row["source"] == "measured"]
    assert ours
    assert {(row["figure"], row["median"]) for row in ours} == {("", "")}
    assert {row["short"] == row["answers"] for row in ours} == {True}
    for kind in (".md", ".tex"):
        said = " ".join(paths[kind].read_text().split())
        assert "Answers of at most one token" in said


def test_sweeps_and_figures_say_that_there_is_no_speed(tmp_path: Path) -> None:
    made = report(["chunk_pp"], ["demo"], [0.0], prompts=2)
    made.samples = emptied(made.samples)
    with pytest.raises(UsageError, match="none has a speed"):
        plot([made], tmp_path / "f.svg")
    for axis, value in (("stages", 4), ("depth", (3, 3))):
        sweep = Sweep("paper-7b", "virtual", made.settings | {"temperature": 0.0}, axis=AXES[axis])  # type: ignore[index]
        sweep.point(value).report = made
        with pytest.raises(UsageError, match="none has a speed"):
            plot_sweep(sweep, tmp_path / "f.svg")
        assert "2 of 2 of a strategy" in " ".join(sweep_notes(sweep))
        cells = [cell for _, table in sweep_tables(sweep) for column in table.columns[1:]
                 for cell in column.cells]
        assert not any("0.00" in str(cell) for cell in cells)
    assert list(tmp_path.iterdir()) == []


def test_files_from_before_call_no_near_tie_identical(tmp_path: Path) -> None:
    made = report(["chunk_pp"], ["demo"], [0.0], prompts=2)
    path = tmp_path / "old.json"
    made.save(path)
    data = json.loads(path.read_text())
    for sample in data["samples"]:
        del sample["different_tokens"], sample["answer"]
    data["samples"][1] |= {"near_ties": True, "tokens": 0, "tokens_per_second": 0.0}
    path.write_text(json.dumps(data))
    [row] = load_report(path).rows
    assert (row.identical, row.different_answers, row.near_ties, row.different_tokens) == (False, 1, 1, None)
    assert row.short == 1
