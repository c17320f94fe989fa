"""The paper's tables, read back from the Markdown and compared with the rows."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import mean

import pytest
from kits.bench_reports import report

from flowspec_edge.lab.bench.paper_results import load_paper_results
from flowspec_edge.lab.bench.paper_tables import paper_tables
from flowspec_edge.lab.bench.results import BenchReport

EVERY = ["autoregressive", "spd", "flowspec", "pipedec", "chunk_pp", "pruned_pp", "megatron",
         "flowspec_no_sbd", "galaxy"]
TASKS = ["qa", "rag"]

Table = list[list[str]]  # a header, then rows


def sections(text: str, errors: bool = False) -> dict[str, str]:
    """Table I, II and III by their numeral."""
    text = text if errors else re.sub(r"( ± [\d.]+)? \([\d.]+\)", "", text)
    return {part.split(":")[0]: part for part in re.split(r"^# Table ", text, flags=re.MULTILINE)[1:]}


def parse(text: str) -> list[Table]:
    """The pipe tables of a Markdown text, in order; a cell is stripped."""
    tables: list[Table] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not inside:
                tables.append([])
            tables[-1].append(cells)
        inside = line.startswith("|")
    for table in tables:
        assert all(re.fullmatch(r":?-+:?", cell) for cell in table.pop(1))
        assert len({len(row) for row in table}) == 1
    return tables


def test_table_one_has_every_figure_in_its_place() -> None:
    made = report(EVERY, TASKS, [0.0, 1.0])
    tables = parse(sections(paper_tables([made]))["I"])
    assert len(tables) == 2
    names = {"Megatron-LM": "megatron", "Galaxy": "galaxy", "Chunk-PP": "chunk_pp", "PipeDec": "pipedec",
             "FlowSpec": "flowspec", "SPD": "spd", "Pruned PP": "pruned_pp",
             "FlowSpec w/o SBD": "flowspec_no_sbd"}
    for temperature, (header, *body) in zip((0.0, 1.0), tables, strict=True):
        assert header == ["method", "qa", "SR", "rag", "SR", "mean", "SR"]
        assert [row[0] for row in body] == list(names)  # the paper's order, then as measured
        for name, *cells in body:
            speeds = {}
            for strategy in (names[name], "chunk_pp"):
                speeds[strategy] = [mean(s.tokens_per_second for s in made.samples
                                         if s.cell == (strategy, task, temperature)) for task in TASKS]
                speeds[strategy].append(mean(speeds[strategy]))
            for speed, base, shown, ratio in zip(speeds[names[name]], speeds["chunk_pp"], cells[::2],
                                                 cells[1::2], strict=True):
                assert (shown, ratio) == (f"{speed:.2f}", f"{speed / base:.2f}")


def test_table_two_has_the_means_of_alt_and_alr() -> None:
    made = report(EVERY, TASKS, [0.0, 1.0])
    (header, *body), = parse(sections(paper_tables([made]))["II"])
    assert header == ["method", "ALT, T = 0", "ALR, T = 0", "ALT, T = 1", "ALR, T = 1"]
    flowspec = next(row for row in body if row[0] == "FlowSpec")
    expected = []
    for temperature in (0.0, 1.0):
        for count in ("turns", "rounds"):
            ratios = []
            for task in TASKS:
                mine = [s for s in made.samples if s.cell == ("flowspec", task, temperature)]
                ratios.append(sum(s.tokens - 1 for s in mine) / sum(getattr(s, count) for s in mine))
            expected.append(f"{mean(ratios):.2f}")
    assert flowspec[1:] == expected


def test_table_three_is_the_ablation() -> None:
    tables = parse(sections(paper_tables([report(EVERY, TASKS, [0.0])]))["III"])
    assert [[row[0] for row in table[1:]] for table in tables] == [
        ["Chunk-PP", "Pruned PP", "FlowSpec w/o SBD", "FlowSpec"]]


def test_unmeasured_values_are_absent_or_a_dash() -> None:
    made = report(["flowspec", "autoregressive"], TASKS, [0.0])
    made.samples = [s for s in made.samples if s.cell != ("flowspec", "rag", 0.0)]
    (_, *body), = parse(sections(paper_tables([made]))["I"])
    assert [row[0] for row in body] == ["FlowSpec"]
    assert body[0][2:] == ["–"] * 5
    text = paper_tables([made], only=["autoregressive"])
    assert [row[0] for row in parse(sections(text)["I"])[0]] == ["method", "autoregressive"]
    assert "None of its methods was measured." in sections(text)["III"]


def test_each_report_has_a_block_with_its_conditions() -> None:
    seven = report(["flowspec", "chunk_pp"], ["qa"], [0.0])
    here = report(["flowspec"], ["qa"], [0.0], profile=None)
    here.settings |= {"draft": "own", "pipedec_width": 32}
    here.samples = [replace(sample, draft="lm") for sample in here.samples]
    for part in sections(paper_tables([seven, here])).values():
        first, second = re.split(r"^## ", part, flags=re.MULTILINE)[1:]
        assert first.startswith("tiny model, 4 stages, VIRTUAL TIME under paper-7b\n")
        assert second.startswith("tiny model, 4 stages, wall clock on this machine\n")
        assert "VIRTUAL TIME" not in second
        assert "eagle2: FlowSpec, Chunk-PP" in first
        assert "lm: FlowSpec" in second


def test_notes_on_repeats_differences_and_gaps() -> None:
    made = report(["flowspec", "chunk_pp"], TASKS, [1.0], repeats=3)
    made.samples[0] = replace(made.samples[0], identical=False)  # flowspec's, on the first task
    made.complete = False
    text = sections(paper_tables([made]), errors=True)["I"]
    (_, *body), = parse(text)
    row = made.rows[0]
    median = f"({row.tokens_per_second_median:.2f})"
    shown = f"{row.tokens_per_second:.2f} ± {row.tokens_per_second_se:.2f} {median} ≠"
    assert (row.strategy, body[1][:2]) == ("flowspec", ["FlowSpec", shown])
    assert "≠" not in body[0][1] + body[1][3]
    assert "flowspec 1/18 ≠ answers, 0/" in text
    assert "**The run was interrupted: some of it is missing.**" in text


# Table I's and II's means as the paper prints them, L2 7B: tokens/s and SR at T = 0 and 1; ALT and ALR.
PAPER = {"Megatron-LM": ("2.02", "0.33", "1.93", "0.33", "–", "–"),
         "Galaxy": ("2.10", "0.35", "2.00", "0.35", "–", "–"),
         "Chunk-PP": ("6.08", "1.00", "5.78", "1.00", "0.54", "4.89"),
         "PipeDec": ("7.03", "1.16", "7.02", "1.21", "0.59", "5.68"),
         "FlowSpec": ("8.70", "1.43", "8.38", "1.45", "1.01", "8.67")}


def test_the_papers_means_stand_beside_ours() -> None:
    made = report(EVERY, TASKS, [0.0, 1.0])
    text = sections(paper_tables([made], published=load_paper_results()))
    cold, warm = parse(text["I"])
    accepted, = parse(text["II"])
    for table in (cold, warm):
        assert table[0][-4:] == ["paper, LLaMA2-Chat 7B", "SR", "paper, Vicuna 7B", "SR"]
    shown = {a[0]: (*a[-4:-2], *b[-4:-2], *c[-4:-2])
             for a, b, c in zip(cold[1:], warm[1:], accepted[1:], strict=True)}
    assert {name: shown[name] for name in PAPER} == PAPER
    assert shown["SPD"] == ("–",) * 6
    assert "Columns headed “paper”: the FlowSpec paper, tables I to III" in text["I"]


@pytest.mark.parametrize("other", [
    report(EVERY, TASKS, [0.0], stages=7), report(EVERY, TASKS, [0.0], profile="orin-nano-8gb"),
    report(EVERY, TASKS, [0.0], profile=None)])
def test_no_paper_columns_for_other_testbeds(other: BenchReport) -> None:
    text = paper_tables([other], published=load_paper_results())
    assert "paper," not in text
    assert "The paper has no figures for this testbed." in text
