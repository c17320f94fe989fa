"""Figures of a sweep: lines over the axis and the paper's (dashed), or heat maps of tree depths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from flowspec_edge.bench.render.plots import check_figure, new_figure, save_figure
from flowspec_edge.bench.render.styles import style_of
from flowspec_edge.bench.results.axes import Value
from flowspec_edge.bench.results.paper_results import BandwidthCurves, DepthCells
from flowspec_edge.bench.results.report import Sweep
from flowspec_edge.bench.results.rows import ReportRow
from flowspec_edge.bench.sweeps.table import best_and_worst, grid_axes, measured_as, published_depths, title
from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LETTERS_AN_INCH = 15  # of text at 8 points
_OURS: dict[str, Any] = {"markersize": 4.5}
_THEIRS: dict[str, Any] = {"markersize": 4, "markerfacecolor": "white", "linestyle": "--",
                           "linewidth": 1.2}


def plot_sweep(sweep: Sweep, path: Path) -> None:
    check_figure(path)
    speeds = sweep.speeds()
    if not speeds:
        raise UsageError("the sweep holds no rows yet: nothing to plot")
    save_figure(depth_figure(sweep) if sweep.axis.name == "depth" else _lines(sweep, speeds), path)


def _lines(sweep: Sweep, speeds: Mapping[str, Mapping[Value, ReportRow]]) -> Figure:
    from matplotlib.lines import Line2D

    figure, (axis,) = new_figure(1, 8.4, 4.4)
    theirs = sweep.published if isinstance(sweep.published, BandwidthCurves) else None
    shown: set[float] = set()
    for name, rows in speeds.items():
        _, colour, marker = style_of(name)
        points = {value: row for value, row in rows.items() if not isinstance(value, tuple)}
        shown |= points.keys()
        wrong = " ≠" if not all(row.identical for row in points.values()) else ""
        axis.errorbar(list(points), [row.tokens_per_second for row in points.values()],
                      [row.tokens_per_second_se or 0.0 for row in points.values()], capsize=2, color=colour,
                      marker=marker, **_OURS)
        axis.plot([], [], color=colour, linewidth=4, marker=marker, label=f"{_named(rows, name)}{wrong}")
        if theirs and (curve := theirs.curve(name)):
            axis.plot(list(curve), list(curve.values()), color=colour, marker=marker, **_THEIRS)
            shown |= curve.keys()
    kinds = [Line2D([], [], color="black", label=measured_as(sweep), marker="o",
                    **_OURS)]
    if theirs:
        kinds.append(Line2D([], [], color="black", label=f"published: {theirs.source}; {theirs.model}",
                            marker="o", **_THEIRS))
    _ticks(axis, sorted(shown))
    axis.set_ylim(bottom=0)
    axis.set_xlabel(sweep.axis.label)
    axis.set_ylabel("tokens/s")
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.set_title(_caption(sweep), loc="left", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.legend(handles=kinds, fontsize=8, loc="outside lower left", frameon=False)
    return figure


def _named(rows: Mapping[Value, ReportRow], name: str) -> str:
    draft = next(iter(rows.values())).draft
    return f"{name} ({draft})" if draft else name


def _ticks(axis: Axes, values: list[float]) -> None:
    if len(values) > 1 and values[0] > 0:
        axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)


def depth_figure(sweep: Sweep) -> Figure:
    """A heat map of the tree depths for each strategy."""
    speeds = sweep.speeds()
    axes_of = {name: grid_axes(rows) for name, rows in speeds.items()}
    tallest = max(len(depths) for depths, _ in axes_of.values())
    widest = max(len(expansions) for _, expansions in axes_of.values())
    figure, axes = new_figure(len(speeds), max(6.4, 1.6 + 0.75 * widest), 1.6 + 0.5 * tallest)
    for axis, (name, rows) in zip(axes, speeds.items(), strict=True):
        _draw_grid(axis, rows, *axes_of[name])
        axis.set_title(_caption(sweep, name), loc="left", fontsize=9)
    if isinstance(sweep.published, DepthCells):
        width = int(figure.get_figwidth() * _LETTERS_AN_INCH)
        lines = wrap(published_depths(sweep.published), width, break_on_hyphens=False)
        figure.supxlabel("\n".join(lines), fontsize=8, x=0.01, ha="left")
    return figure


def _draw_grid(axis: Axes, rows: Mapping[Value, ReportRow], depths: list[int], expansions: list[int]) -> None:
    from matplotlib.patches import Rectangle

    cells = [[rows.get((depth, expansion)) for expansion in expansions] for depth in depths]
    best, worst = best_and_worst(rows)
    most, least = rows[best].tokens_per_second, rows[worst].tokens_per_second
    axis.imshow([[row.tokens_per_second if row else float("nan") for row in line] for line in cells],
                cmap="YlGnBu", aspect="auto", vmin=least - 0.1 * (most - least), vmax=most)
    for y, depth in enumerate(depths):
        for x, expansion in enumerate(expansions):
            row, value = cells[y][x], (depth, expansion)
            if row is None:
                continue
            dark = most > least and (row.tokens_per_second - least) / (most - least) > 0.6
            word = {worst: "worst", best: "best"}.get(value, "") if best != worst else ""
            text = f"{row.tokens_per_second:.2f}{'' if row.identical else ' ≠'}"
            axis.text(x, y, f"{text}\n{word}" if word else text, ha="center", va="center", fontsize=8,
                      color="white" if dark else "black")
            if word:
                axis.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor="#ee6677",
                                         linewidth=1.8))
    axis.set_xticks(range(len(expansions)), [str(expansion) for expansion in expansions])
    axis.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    axis.set_xlabel("levels of an expansion (d_exp)")
    axis.set_ylabel("levels of the initial tree (d0)")


def _caption(sweep: Sweep, strategy: str = "") -> str:
    return f"{sweep.settings['model']}, {title(sweep, strategy)}"
