"""Tables have every figure, however narrow the terminal; a sweep's tables and figures are the sweep's."""

from __future__ import annotations

import io
import math
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kits.bench_reports import SETTINGS, report
from rich.console import Console

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.axes import AXES, Value
from flowspec_edge.lab.bench.paper_results import load_paper_results
from flowspec_edge.lab.bench.plots import plot_sweep
from flowspec_edge.lab.bench.results import Sweep
from flowspec_edge.lab.bench.rows import ReportRow
from flowspec_edge.lab.bench.styles import style_of
from flowspec_edge.lab.bench.tables import measured_as, show, sweep_notes, sweep_tables, sweep_title, table

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["megatron", "flowspec"]


def made(axis: str, values: list[Value], names: list[str] = NAMES, tasks: tuple[str, ...] = ("qa",),
         published: bool = True) -> Sweep:
    facts = [{"name": task, "prompts": 3} for task in tasks]
    sweep = Sweep("paper-7b", "virtual", {**SETTINGS, "temperature": 0.0, "tasks": facts}, complete=True,
                  axis=AXES[axis])
    if published:
        theirs = load_paper_results()
        sweep.published = (theirs.bandwidths("paper-7b", 4, 0.0) if axis == "bandwidth" else
                           theirs.depths("paper-7b", 4) if axis == "depth" else None)
    for seed, value in enumerate(values):
        sweep.point(value).report = report(names, list(tasks), [0.0], seed=seed)
    return sweep


def lines(sweep: Sweep, errors: bool = False) -> list[list[str]]:
    """The words of every line of the tables; captions are left out, and standard errors unless wanted."""
    console = Console(file=io.StringIO(), width=40)
    for _, drawn in sweep_tables(sweep):
        show(console, drawn)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    text = text if errors else re.sub(r" ± [\d.]+( \([\d.]+\))?", "", text)
    return [line.split() for line in text.splitlines() if line.strip() and "─" not in line]


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("tasks", [("qa",), ("qa", "rag")])
def test_a_row_per_strategy_with_the_papers_below(tasks: tuple[str, ...]) -> None:
    sweep = made("bandwidth", [125, 1000, 62.5], tasks=tasks)
    head, *rows = lines(sweep)
    assert head == ["strategy", "draft", "1000", "Mbps", "125", "Mbps", "62.5", "Mbps", "kept"]
    assert [row[0] for row in rows] == ["megatron", "published", "flowspec", "published"]
    for name, row in zip(NAMES, rows[::2], strict=True):
        speeds = [next(m.tokens_per_second for m in point.report.means if m.strategy == name)
                  for point in sweep.points]
        assert row[1:] == ["eagle2", *(f"{speed:.2f}" for speed in speeds), f"{speeds[-1] / speeds[0]:.1%}"]
    assert rows[1][1:] == ["2.25", "0.96", "–", "–"]
    assert rows[3][1:] == ["9.44", "8.76", "–", "–"]
    assert "kept: tokens/s at 62.5 Mbps as a share of those at 1000 Mbps." in sweep_notes(sweep)
    assert [line[-1] for line in lines(made("bandwidth", [125, 1000]))[2::2]] == ["42.7%", "92.8%"]


def test_without_published_figures_there_is_no_row_for_them() -> None:
    assert [row[0] for row in lines(made("bandwidth", [125], published=False))] == ["strategy", *NAMES]
    assert [row[0] for row in lines(made("latency", [0.5, 1]))] == ["strategy", *NAMES]


def test_missing_and_different_values_are_marked() -> None:
    sweep = made("segment", [4, 8])
    late = sweep.point(8).report
    late.samples = [replace(s, identical=False) for s in late.samples if s.strategy == "megatron"]
    sweep.complete = False
    _, megatron, flowspec = lines(sweep)
    assert megatron[4] == "≠"
    assert flowspec[-2:] == ["–", "–"]
    assert sweep_notes(sweep)[-1].startswith("INCOMPLETE")


def test_errors_are_those_over_the_prompts() -> None:
    sweep = made("stages", [2])
    sweep.point(2).report = report(NAMES, ["qa"], [0.0], repeats=3)
    row = sweep.speeds()["flowspec"][2]
    by_prompt = [statistics.fmean(s.tokens_per_second for s in sweep.point(2).report.samples
                                  if (s.strategy, s.prompt) == ("flowspec", prompt)) for prompt in range(3)]
    error = statistics.stdev(by_prompt) / math.sqrt(3)
    assert lines(sweep, errors=True)[2] == ["flowspec", "eagle2", f"{row.tokens_per_second:.2f}", "±",
                                            f"{error:.2f}", f"({statistics.median(by_prompt):.2f})", "–"]


def test_measured_rates_are_those_of_the_slowest_device() -> None:
    sweep = made("bandwidth", [125, 250])
    sweep.point(125).measured_mbps = [119.5, 118.25]
    assert lines(sweep)[-1] == ["measured", "Mbps,", "slowest", "device", "–", "118.25"]


def test_a_grid_marks_its_best_and_worst_cell() -> None:
    pairs: list[Value] = [(3, 3), (3, 5), (5, 3), (8, 3)]
    sweep = made("depth", pairs, ["flowspec"])
    speeds = {pair: row.tokens_per_second for pair, row in sweep.speeds()["flowspec"].items()}
    best, worst = max(speeds, key=lambda p: speeds[p]), min(speeds, key=lambda p: speeds[p])
    mark = {best: "▲", worst: "▼"}
    cells = [f"{speeds[pair]:.2f}{mark.get(pair, '')}" for pair in pairs]
    assert lines(sweep) == [["d0", "\\", "d_exp", "3", "5"], ["3", *cells[:2]], ["5", cells[2], "–"],
                            ["8", cells[3], "–"]]
    said = "\n".join(sweep_notes(sweep))
    assert f"▲ best (d0, d_exp) = {best} {speeds[best]:.2f}, ▼ worst {worst} {speeds[worst]:.2f}" in said
    assert "best (5, 5) 9.65, worst (8, 3) 8.79, 91% of it" in said
    assert "not measured here" in said


def test_captions_name_the_clock() -> None:
    sweep = made("bandwidth", [125])
    assert sweep_title(sweep) == "tokens/s by link bandwidth, VIRTUAL TIME under paper-7b, 4 stages, T = 0"
    real = replace(sweep, links="namespaces", clock="wall")
    assert measured_as(real) == ("EMULATED: wall clock, shaped links of this machine, real processes that "
                                 "compute as long as paper-7b says")
    fleet = replace(sweep, links="cluster", clock="wall", profile=None)
    assert measured_as(fleet) == "wall clock, a cluster's shaped links"


def test_the_figure_of_a_bandwidth_sweep(tmp_path: Path) -> None:
    sweep = made("bandwidth", [125, 1000])
    plot_sweep(sweep, tmp_path / "f.svg")
    found = texts(tmp_path / "f.svg")
    assert [text for text in found if re.fullmatch(r"\d{3,}", text)] == ["125", "250", "500", "1000"]
    assert "VIRTUAL TIME under paper-7b" in found
    assert any(text.startswith("published: the FlowSpec paper, figure 5") for text in found)
    assert {f"{name} (eagle2)" for name in NAMES} <= set(found)
    svg = (tmp_path / "f.svg").read_text()
    dashed = re.findall(r'stroke-dasharray: [^0][^"]*stroke: (#\w{6})', svg)
    assert [dashed.count(style_of(name).colour) for name in ("megatron", "flowspec")] == [1, 1]  # as ours
    plot_sweep(replace(sweep, published=None), tmp_path / "g.svg")
    assert not any("published" in text for text in texts(tmp_path / "g.svg"))


@pytest.mark.parametrize(("axis", "values", "says"), [
    ("latency", [0, 0.5, 10], "link latency, one way (ms)"),
    ("stages", [2, 32], "stages"),
    ("segment", [16], "longest segment (rows)"),
])
def test_the_figures_of_the_other_axes(tmp_path: Path, axis: str, values: list[Value], says: str
                                       ) -> None:
    plot_sweep(made(axis, values), tmp_path / "f.svg")
    found = texts(tmp_path / "f.svg")
    assert says in found
    assert [f"{value:g}" for value in values] == found[:len(values)]


def test_the_figure_of_a_grid(tmp_path: Path) -> None:
    sweep = made("depth", [(3, 3), (3, 5), (5, 3)], ["flowspec", "pruned_pp"])
    plot_sweep(sweep, tmp_path / "f.svg")
    found = texts(tmp_path / "f.svg")
    for name in ("flowspec", "pruned_pp"):
        assert f"tiny, {name}, tokens/s by tree depths, VIRTUAL TIME under paper-7b, 4 stages, T = 0" in found
    said = " ".join(found)
    for rows in sweep.speeds().values():
        for row in rows.values():
            assert f"{row.tokens_per_second:.2f}" in said
    assert said.count("best") == 3  # a cell of each grid, and the paper's
    assert "best (5, 5) 9.65" in said


def test_one_cell_is_neither_best_nor_worst(tmp_path: Path) -> None:
    plot_sweep(made("depth", [(5, 5)], ["flowspec"], published=False), tmp_path / "f.svg")
    assert not any("best" in text or "worst" in text for text in texts(tmp_path / "f.svg"))


def test_no_plot_without_rows_or_matplotlib(tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nothing to plot"):
        plot_sweep(made("bandwidth", []), tmp_path / "f.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[plot\]'$"):
        plot_sweep(made("bandwidth", [125]), tmp_path / "f.svg")
    assert list(tmp_path.iterdir()) == []


def test_no_figure_is_truncated_in_a_narrow_terminal() -> None:
    rows = [replace(row, tokens_per_second=1234.56, tokens_per_second_se=23.45, ttft_s=6789.01, alr=7654.32)
            for row in report(["chunk_pp", "flowspec_no_sbd"], ["translation", "math_reasoning"], [0.0]).rows]
    printed = []
    for width in (40, 300):
        file = io.StringIO()
        show(Console(file=file, width=width), table(rows, "VIRTUAL TIME"))
        printed.append([line.rstrip() for line in file.getvalue().splitlines()])
    lines, wide = printed
    assert lines == wide
    (row,) = (line for line in lines if line.startswith("math_reasoning"))
    for figure in ("1234.56", "23.45", "6789.01", "7654.32", "chunk_pp", "0/3"):
        assert figure in row.split()


def test_file_names_cannot_control_the_terminal() -> None:
    row = report(["chunk_pp"], ["qa"], [0.0]).rows[0]
    rows = [replace(row, strategy="[red]mine[/red]", task="a\x1b]0;title\x07"), replace(row, task="[/b]")]
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True, color_system=None)
    show(console, table(rows, "under [/x] \x9b"))
    for shown in ("[red]mine[/red]", r"a\x1b]0;title\x07", "[/b]", r"under [/x] \x9b"):
        assert shown in file.getvalue()
    assert not {"\x07", "\x9b"} & {*file.getvalue()}


def test_joules_have_columns_if_measured() -> None:
    plain = report(["chunk_pp", "flowspec"], ["qa"], [0.0]).rows

    def printed(rows: list[ReportRow]) -> list[str]:
        file = io.StringIO()
        show(Console(file=file, width=200), table(rows, "wall clock"))
        return [line.rstrip() for line in file.getvalue().splitlines()]

    lines = printed([replace(plain[0], joules_per_token=4.567, joules_per_token_above_idle=-0.004), plain[1]])
    assert lines[0] == "wall clock; J/token: measured, without carrier boards"
    header, first, second = (line.split() for line in (lines[1], lines[3], lines[4]))
    assert header[-7:] == ["J/token", "above", "idle", "answers", "≠", "tokens", "≠"]
    assert first[-4:-1] == ["4.57", "-0.00", "0/3"]
    assert second[-4:-1] == ["–", "–", "0/3"]
    assert not any("J/token" in line for line in printed(plain))
