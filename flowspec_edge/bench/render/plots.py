"""Plots: bars and lines of tokens/s, and a Gantt chart of the devices' work.

matplotlib is an optional dependency, imported when a figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec_edge.bench.render.styles import style_of
from flowspec_edge.bench.render.table import timing
from flowspec_edge.bench.render.timeline import Window
from flowspec_edge.bench.results.report import BenchReport
from flowspec_edge.bench.results.rows import ReportRow
from flowspec_edge.errors import UsageError
from flowspec_edge.runtime.virtual.clock import Span
from flowspec_edge.util.files import check_writable, write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".svg", ".png")
_RUNS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#222255")  # the last: of no run
_CANCELLED = "#dddddd"


def check_figure(path: Path) -> None:
    """UsageError if ``path`` cannot become a figure: suffix, matplotlib, permission."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{path}: a figure must end in {' or '.join(_SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("figures need matplotlib: in flowspec's clone, pip install '.[plot]'") from None
    check_writable(path)


def plot(reports: Sequence[BenchReport], path: Path) -> None:
    """Plot tokens/s of every strategy, with SR above the bars.

    Reports with different numbers of stages become lines over stages, one panel for each profile and
    temperature.  Otherwise each report has a panel of bars for each temperature, grouped by task; with one
    task, a single panel, grouped by temperature.
    """
    check_figure(path)
    if not any(report.rows for report in reports):
        raise UsageError("the reports hold no rows yet: nothing to plot")
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
        left, width = (start - view.start) / view.slot + view.skipped, (end - start) / view.slot
        colour = _CANCELLED if span.cancelled else _RUNS[span.run % 6 if span.run >= 0 else 6]
        axis.barh(line, width, left=left, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
        if span.device and width > 0.25:
            axis.text(left + width / 2, line, str(span.run), ha="center", va="center", fontsize=7)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlim(view.skipped, view.skipped + view.turns)
    axis.set_xlabel(f"turns after the first token (1 turn = {view.slot * 1e3:.3g} ms)")
    axis.set_title(f"{caption}; grey: cancelled", loc="left", fontsize=9)
    save_figure(figure, path)


BarPanel = tuple[str, list[ReportRow], bool]  # (caption, rows, whether groups are tasks)


def _bar_panels(report: BenchReport) -> list[BarPanel]:
    caption = f"{report.settings['model']}, {report.settings['stages']} stages, " \
              f"{timing(report.clock, report.profile)}"
    if len({row.task for row in report.rows}) == 1:
        return [(f"{caption}, {report.rows[0].task}", report.rows, False)]
    return [(f"{caption}, T = {t:g}", [r for r in (*report.rows, *report.means) if r.temperature == t], True)
            for t in dict.fromkeys(row.temperature for row in report.rows)]


def _line_panels(reports: Sequence[BenchReport]) -> dict[str, dict[str, list[tuple[int, ReportRow]]]]:
    """caption → strategy → [(stages, mean over tasks)]."""
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
        mine = [row for row in rows if row.strategy == name]
        at = [groups.index(group(row)) + (names.index(name) - (len(names) - 1) / 2) * width for row in mine]
        spread: Any = [row.tokens_per_second_se or 0.0 for row in mine]
        bars = axis.bar(at, [row.tokens_per_second for row in mine], width * 0.94,
                        color=style_of(name).colour, label=_named(mine[0]), capsize=2,
                        yerr=spread if any(spread) else None)
        axis.bar_label(bars, [_label(row) for row in mine], fontsize=6, padding=1)
    axis.set_xticks(range(len(groups)), groups)
    _finish(axis, f"{caption}; above the bars: SR")


def _label(row: ReportRow) -> str:
    ratio = "" if row.speedup is None else f"{row.speedup:.2f}"
    return ratio if row.identical else f"{ratio} ≠".lstrip()


def _named(row: ReportRow) -> str:
    return f"{row.strategy} ({row.draft})" if row.draft else row.strategy


def _draw_lines(axis: Axes, caption: str, lines: dict[str, list[tuple[int, ReportRow]]]) -> None:
    for name, points in lines.items():
        x, y = [stages for stages, _ in points], [row.tokens_per_second for _, row in points]
        style = style_of(name)
        axis.plot(x, y, marker=style.marker, markersize=4, color=style.colour, label=_named(points[0][1]))
    axis.set_xticks(sorted({stages for points in lines.values() for stages, _ in points}))
    axis.set_xlabel("stages")
    _finish(axis, caption)


def _finish(axis: Axes, caption: str) -> None:
    axis.set_ylim(bottom=0)
    axis.margins(y=0.12)
    axis.set_ylabel("tokens/s")
    axis.set_title(caption, loc="left", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def new_figure(panels: int, width: float, height: float = 3.2) -> tuple[Figure, Sequence[Axes]]:
    """``panels`` axes, one below the other, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * panels), layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False)[:, 0].tolist()


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure atomically, in the format of ``path``'s suffix."""
    write_output(path, figure_bytes(figure, path.suffix.lower()[1:]))


def figure_bytes(figure: Figure, kind: str, about: str = "") -> bytes:
    """``kind``: svg, png or pdf; ``about`` becomes the description in the file's metadata."""
    from matplotlib import rc_context

    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    keys = {"svg": "Description", "pdf": "Subject", "png": "Description"}
    data = io.BytesIO()
    # Text stays text, and equal figures give equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flowspec", "pdf.fonttype": 42}):
        figure.savefig(data, format=kind, dpi=150,
                       metadata={**dates.get(kind, {}), **({keys[kind]: about} if about else {})})
    return data.getvalue()
