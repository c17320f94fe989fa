"""Figures: bars and lines of tokens/s, heat maps of tree depths, a Gantt chart of the devices' work.

matplotlib is an optional dependency, imported when a figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from flowspec_edge.drivers.virtual.clock import Span
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.axes import Scalar, Value, label
from flowspec_edge.lab.bench.paper_results import BandwidthCurves, DepthCells
from flowspec_edge.lab.bench.results import BenchReport, Sweep
from flowspec_edge.lab.bench.rows import ReportRow
from flowspec_edge.lab.bench.styles import style_of
from flowspec_edge.lab.bench.tables import (
    best_and_worst,
    grid_axes,
    measured_as,
    published_depths,
    sweep_title,
    timing,
)
from flowspec_edge.lab.bench.timeline import Window
from flowspec_edge.util.files import check_writable, write_output
from flowspec_edge.util.terminal import counted_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NO_SPEED = "no answer has a second token, so none has a speed: nothing to plot; raise --limit"
_SUFFIXES = (".svg", ".png")
_RUNS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#222255")  # the last: of no run
_CANCELLED = "#dddddd"
HOLLOW: dict[str, Any] = {  # a line that a paper published
    "markersize": 5, "markerfacecolor": "white", "linestyle": "--", "linewidth": 0.8}
ERRORS: dict[str, Any] = {"elinewidth": 0.8, "capsize": 2, "ecolor": "#333333"}


def check_figure(path: Path) -> None:
    """Raise UsageError if ``path`` cannot become a figure: suffix, matplotlib, permission."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{path}: a figure must end in {' or '.join(_SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("figures need matplotlib: in flowspec's clone, pip install '.[plot]'") from None
    check_writable(path)


def plot(reports: Sequence[BenchReport], path: Path) -> None:
    """Plot tokens/s of every strategy; above its bar is the ratio to Chunk-PP's.

    Reports with different numbers of stages become lines over stages, one panel for each profile and
    temperature.  Otherwise each report has a panel of bars for each temperature, grouped by task; with one
    task, a single panel, grouped by temperature.
    """
    check_figure(path)
    if not any(report.rows for report in reports):
        raise UsageError("the reports hold no rows yet: nothing to plot")
    if all(row.tokens_per_second is None for report in reports for row in report.rows):
        raise UsageError(NO_SPEED)
    if any(report.concurrent for report in reports):
        raise UsageError("figures are of requests that run one by one; for --clients and --arrival-rate "
                         "there is a table: flowspec bench tables --from OUT.json")
    if len({report.settings["stages"] for report in reports}) > 1:
        panels = _line_panels(reports)
        figure, axes = new_figure(len(panels), 7.0)
        for axis, (caption, lines) in zip(axes, panels.items(), strict=True):
            _draw_lines(axis, caption, lines)
    else:
        bars = [panel for report in reports for panel in _bar_panels(report)]
        methods = len({row.strategy for report in reports for row in report.rows})
        widest = max(len({(r.task, r.temperature) for r in rows}) * methods for _, rows, _ in bars)
        figure, axes = new_figure(len(bars), max(6.0, 1.5 + 0.34 * widest))
        for axis, (caption, rows, by_task) in zip(axes, bars, strict=True):
            _draw_bars(axis, caption, rows, by_task)
    save_figure(figure, path)


def gantt(spans: Sequence[Span], stages: int, view: Window, caption: str, path: Path) -> None:
    """Draw a bar for every piece of work, with its run's number; cancelled work is grey."""
    check_figure(path)
    figure, (axis,) = new_figure(1, 13.0, 0.9 + 0.4 * (stages + 2))
    names = ["D0 draft", "D0 verify", *(f"V{i}" for i in range(1, stages + 1))]
    for span in spans:
        if span.end <= view.start or span.start >= view.end:
            continue
        line = {"draft": 0, "verify": 1}.get(span.kind, span.device + 1)
        start, end = max(span.start, view.start), min(span.end, view.end)
        bar_start, width = (start - view.start) / view.slot + view.skipped, (end - start) / view.slot
        colour = _CANCELLED if span.cancelled else _RUNS[span.run % 6 if span.run >= 0 else 6]
        axis.barh(line, width, left=bar_start, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
        if span.device and width > 0.25:
            axis.text(bar_start + width / 2, line, str(span.run), ha="center", va="center", fontsize=7)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlim(view.skipped, view.skipped + view.turns)
    axis.set_xlabel(f"turns after the first token (1 turn = {view.slot * 1e3:.3g} ms)")
    axis.set_title(f"{caption}; grey: cancelled", loc="left", fontsize=8)
    save_figure(figure, path)


BarPanel = tuple[str, list[ReportRow], bool]  # (caption, rows, whether groups are tasks)


def _bar_panels(report: BenchReport) -> list[BarPanel]:
    caption = f"{report.settings['model']}, {counted_stages(report.settings['stages'])}, " \
              f"{timing(report.clock, report.profile)}"
    if len({row.task for row in report.rows}) == 1:
        return [(f"{caption}, {report.rows[0].task}", report.rows, False)]
    return [(f"{caption}, T = {t:g}", [r for r in (*report.rows, *report.means) if r.temperature == t], True)
            for t in dict.fromkeys(row.temperature for row in report.rows)]


def _line_panels(reports: Sequence[BenchReport]) -> dict[str, dict[str, list[tuple[int, ReportRow]]]]:
    """Return the lines of each panel: caption → strategy → [(stages, mean over tasks)]."""
    panels: dict[str, dict[str, list[tuple[int, ReportRow]]]] = {}
    for report in sorted(reports, key=lambda report: int(report.settings["stages"])):
        for row in report.means:
            caption = f"{report.settings['model']}, {timing(report.clock, report.profile)}, " \
                      f"T = {row.temperature:g}"
            points = panels.setdefault(caption, {}).setdefault(row.strategy, [])
            points.append((report.settings["stages"], row))
    return panels


def _draw_bars(axis: Axes, caption: str, rows: Sequence[ReportRow], by_task: bool) -> None:
    def group(row: ReportRow) -> str:
        return row.task if by_task else f"T = {row.temperature:g}"

    groups = list(dict.fromkeys(map(group, rows)))
    names = list(dict.fromkeys(row.strategy for row in rows))
    width = 0.84 / len(names)
    for name in names:
        strategy_rows = [row for row in rows if row.strategy == name and row.tokens_per_second is not None]
        if not strategy_rows:
            continue
        at = [groups.index(group(row)) + (names.index(name) - (len(names) - 1) / 2) * width for row in strategy_rows]
        spread: Any = [row.tokens_per_second_se or 0.0 for row in strategy_rows]
        bars = axis.bar(at, [_or_nan(row.tokens_per_second) for row in strategy_rows], width * 0.94,
                        color=style_of(name).colour, label=_series_label(strategy_rows[0]), capsize=2,
                        yerr=spread if any(spread) else None)
        axis.bar_label(bars, [_label(row) for row in strategy_rows], fontsize=6, padding=1)
    axis.set_xticks(range(len(groups)), groups)
    finish(axis, f"{caption}; above the bars: tokens/s over Chunk-PP's")


def _label(row: ReportRow) -> str:
    ratio = "" if row.speedup is None else f"{row.speedup:.2f}"
    return f"{ratio} {row.exactness.mark}".strip()


def _series_label(row: ReportRow) -> str:
    return f"{row.strategy} ({row.draft})" if row.draft else row.strategy


def _draw_lines(axis: Axes, caption: str, lines: dict[str, list[tuple[int, ReportRow]]]) -> None:
    for name, points in lines.items():
        measured = [(stages, row.tokens_per_second, row.tokens_per_second_se) for stages, row in points
                    if row.tokens_per_second is not None]
        if measured:
            draw_curve(axis, name, measured, _series_label(points[0][1]))
    ticks(axis, sorted({stages for points in lines.values() for stages, _ in points}), "stages")
    finish(axis, caption)


def draw_curve(axis: Axes, method: str, points: Sequence[tuple[float, float, float | None]], label: str
               ) -> None:
    """Draw a measured line: x, y and standard error of each point."""
    style, (x, y, errors) = style_of(method), zip(*points, strict=True)
    axis.errorbar(x, y, [error or 0.0 for error in errors] if any(errors) else None, color=style.colour,
                  marker=style.marker, markersize=5, label=label, **ERRORS)


def ticks(axis: Axes, values: Sequence[float], label: str, log: bool = False) -> None:
    """Mark ``values`` on the x axis, and no others."""
    if log:
        axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(label, fontsize=8)


def finish(axis: Axes, caption: str, unit: str = "tokens/s") -> None:
    """Give bars and lines their common look; in the legend the papers' entries are last."""
    axis.set_ylim(bottom=0)
    axis.set_ylabel(unit, fontsize=8)
    axis.set_title(caption, loc="left", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].startswith("paper, "))
    axis.legend([handles[i] for i in order], [labels[i] for i in order], fontsize=7, loc="upper left",
                bbox_to_anchor=(1.0, 1.0), frameon=False)


def new_figure(panels: int, width: float, height: float = 3.2) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure with ``panels`` axes, one below the other, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * panels), layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False)[:, 0].tolist()


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure atomically, in the format of ``path``'s suffix."""
    write_output(path, figure_bytes(figure, path.suffix.lower()[1:]))


def figure_bytes(figure: Figure, kind: str, about: str = "") -> bytes:
    """Render a figure as svg, png or pdf; ``about`` becomes the description in the file's metadata."""
    from matplotlib import rc_context

    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    keys = {"svg": "Description", "pdf": "Subject", "png": "Description"}
    data = io.BytesIO()
    # Text stays text, and equal figures give equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flowspec", "pdf.fonttype": 42}):
        figure.savefig(data, format=kind, dpi=150,
                       metadata={**dates.get(kind, {}), **({keys[kind]: about} if about else {})})
    return data.getvalue()


_LETTERS_AN_INCH = 15  # of text at 8 points


def plot_sweep(sweep: Sweep, path: Path) -> None:
    check_figure(path)
    speeds = sweep.speeds()
    if not speeds:
        raise UsageError("the sweep holds no rows yet: nothing to plot")
    if all(row.tokens_per_second is None for rows in speeds.values() for row in rows.values()):
        raise UsageError(NO_SPEED)
    save_figure(grid_figure(sweep) if sweep.axis.grid else _sweep_lines(sweep, speeds), path)


def _sweep_lines(sweep: Sweep, speeds: Mapping[str, Mapping[Value, ReportRow]]) -> Figure:
    from matplotlib.lines import Line2D

    figure, (axis,) = new_figure(1, 8.4, 4.4)
    curves = sweep.published if isinstance(sweep.published, BandwidthCurves) else None
    texts = [point.value for point in sweep.points if isinstance(point.value, str)]  # at equal distances
    values: set[float] = set()
    for name, rows in speeds.items():
        points = [(float(texts.index(value) if isinstance(value, str) else value), row.tokens_per_second,
                   row.tokens_per_second_se) for value, row in rows.items()
                  if not isinstance(value, tuple) and row.tokens_per_second is not None]
        marks = {row.exactness.mark for row in rows.values()}
        mark_text = next((f" {mark}" for mark in "≠≈" if mark in marks), "")
        if not points:
            continue
        draw_curve(axis, name, points, f"{_series_label(next(iter(rows.values())))}{mark_text}")
        values |= {value for value, _, _ in points}
        if curves and (curve := curves.curve(name)):
            _, colour, marker = style_of(name)
            axis.plot(list(curve), list(curve.values()), color=colour, marker=marker, **HOLLOW)
            values |= curve.keys()
    kinds = [Line2D([], [], color="black", label=measured_as(sweep), marker="o", markersize=5)]
    if curves:
        kinds.append(Line2D([], [], color="black", label=f"published: {curves.source}; {curves.model}",
                            marker="o", **HOLLOW))
    if texts:
        ticks(axis, range(len(texts)), sweep.axis.label)
        axis.set_xticks(range(len(texts)), texts)
    else:
        ticks(axis, sorted(values), sweep.axis.label, log=len(values) > 1 and min(values) > 0)
    finish(axis, _caption(sweep))
    figure.legend(handles=kinds, fontsize=7, loc="outside lower left", frameon=False)
    return figure


def grid_figure(sweep: Sweep) -> Figure:
    """Return a heat map of the pairs for each strategy."""
    speeds = sweep.speeds()
    axes_of = {name: grid_axes(rows) for name, rows in speeds.items()}
    tallest = max(len(firsts) for firsts, _ in axes_of.values())
    widest = max(len(seconds) for _, seconds in axes_of.values())
    figure, axes = new_figure(len(speeds), max(6.4, 1.6 + 0.75 * widest), 1.6 + 0.5 * tallest)
    for axis, (name, rows) in zip(axes, speeds.items(), strict=True):
        _draw_grid(axis, rows, *axes_of[name], sweep.axis.grid_labels)
        axis.set_title(_caption(sweep, name), loc="left", fontsize=8)
    if isinstance(sweep.published, DepthCells):
        width = int(figure.get_figwidth() * _LETTERS_AN_INCH)
        lines = wrap(published_depths(sweep.published), width, break_on_hyphens=False)
        figure.supxlabel("\n".join(lines), fontsize=8, x=0.01, ha="left")
    return figure


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _draw_grid(axis: Axes, rows: Mapping[Value, ReportRow], firsts: Sequence[Scalar], seconds: Sequence[Scalar],
               labels: tuple[str, str]) -> None:
    from matplotlib.patches import Rectangle

    cells = [[rows.get((first, second)) for second in seconds] for first in firsts]
    ends = best_and_worst(rows)
    if ends is None:
        raise UsageError(NO_SPEED)
    best, worst = ends
    most, least = (rows[value].tokens_per_second or 0.0 for value in ends)
    axis.imshow([[_or_nan(row.tokens_per_second if row else None) for row in line] for line in cells],
                cmap="YlGnBu", aspect="auto", vmin=least - 0.1 * (most - least), vmax=most)
    for y, first in enumerate(firsts):
        for x, second in enumerate(seconds):
            row, value = cells[y][x], (first, second)
            if row is None or row.tokens_per_second is None:
                continue
            dark = most > least and (row.tokens_per_second - least) / (most - least) > 0.6
            extreme = {worst: "worst", best: "best"}.get(value, "") if best != worst else ""
            text = f"{row.tokens_per_second:.2f} {row.exactness.mark}".rstrip()
            axis.text(x, y, f"{text}\n{extreme}" if extreme else text, ha="center", va="center", fontsize=8,
                      color="white" if dark else "black")
            if extreme:
                axis.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor="#ee6677",
                                         linewidth=1.8))
    axis.set_xticks(range(len(seconds)), [label(second) for second in seconds])
    axis.set_yticks(range(len(firsts)), [label(first) for first in firsts])
    axis.set_ylabel(labels[0])
    axis.set_xlabel(labels[1])


def _caption(sweep: Sweep, strategy: str = "") -> str:
    return f"{sweep.settings['model']}, {sweep_title(sweep, strategy)}"
