"""Figures of reproduced results: ours filled, the paper's hollow, a method's colour and marker everywhere the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from flowspec_edge.lab.bench.plots import (
    ERRORS,
    HOLLOW,
    NO_SPEED,
    draw_curve,
    finish,
    grid_figure,
    new_figure,
    ticks,
)
from flowspec_edge.lab.bench.results import Sweep
from flowspec_edge.lab.bench.rows import MEAN
from flowspec_edge.lab.bench.styles import style_of
from flowspec_edge.lab.reproduce.catalogue import Kind
from flowspec_edge.lab.reproduce.records import DRAFTS, MEASURED, Measured, Quantity, Record, law

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.2  # inches, a paper's two columns
_LETTERS_AN_INCH = 19  # at 6.5 points
_LABELS = 92  # letters below an axis, at 7 points
_SOURCE_MARKERS = ("o", "s", "^")


def figure_of(kind: Kind, records: Sequence[Record], results: Sequence[Measured], caption: Sequence[str]
              ) -> Figure:
    """Draw a figure of this kind; ``caption``: lines below it."""
    records = [r for r in records if r.figure is not None]
    if not any(r.source == MEASURED for r in records):
        figure, (axis,) = new_figure(1, _WIDTH, 1.0)
        axis.axis("off")
        axis.text(0, 0.5, NO_SPEED, fontsize=8)
    elif kind == "depth":
        assert isinstance(results[0].results, Sweep)
        figure = grid_figure(results[0].results)
        _add_published_cells(figure.axes[0], records)
    else:
        figure = _FIGURES[kind](records)
    width = int(figure.get_figwidth() * _LETTERS_AN_INCH)
    lines = [line for text in caption for line in wrap(text, width, break_on_hyphens=False)]
    figure.set_figheight(figure.get_figheight() + 0.125 * len(lines))
    figure.supxlabel("\n".join(lines), fontsize=6.5, x=0.01, ha="left", color="#444444")
    return figure


def _add_published_cells(axis: Axes, records: Sequence[Record]) -> None:
    columns, rows = ([label.get_text() for label in labels]
                     for labels in (axis.get_xticklabels(), axis.get_yticklabels()))
    published = [r for r in records if r.source != MEASURED]
    for r in published:
        depth, _, expansion = r.at.partition(",")
        if depth in rows and expansion in columns:
            axis.text(columns.index(expansion), rows.index(depth) + 0.33, f"paper: {r.figure:.2f}",
                      ha="center", va="center", fontsize=6.5,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    beside = "; in white: the paper's" if published else ""
    axis.set_title(f"tokens/s of FlowSpec, VIRTUAL TIME under {_shared_title(records)}{beside}", loc="left",
                   fontsize=8)


def _bars(records: Sequence[Record]) -> Figure:
    """Return a panel for each profile, acceptance and temperature, a group of bars for each task.

    The paper's means beside.
    """
    panels = list(dict.fromkeys(r.conditions for r in records if r.source == MEASURED))
    both = len({r.looks_up for r in records}) > 1
    figure, axes = new_figure(len(panels), _WIDTH, 2.1)
    for axis, panel in zip(axes, panels, strict=True):
        panel_records = [r for r in records if r.quantity == "tokens_per_second" and r.conditions == panel]
        profile, acceptance, looks_up, temperature = panel
        drafts = f", {DRAFTS[looks_up]}" if both else ""
        _grouped(axis, panel_records, "tokens/s", f"{profile}, T = {temperature:g}, {acceptance}{drafts}")
    return figure


def _acceptance(records: Sequence[Record]) -> Figure:
    kinds = list(dict.fromkeys((r.profile, r.acceptance, r.looks_up) for r in records))
    both = len({r.looks_up for r in records}) > 1
    names: dict[Quantity, str] = {"alt": "tokens per turn (ALT)", "alr": "tokens per round (ALR)"}
    figure, axes = new_figure(2 * len(kinds), _WIDTH, 1.9)
    panels = [(*kind, quantity) for kind in kinds for quantity in names]
    for axis, (profile, acceptance, looks_up, quantity) in zip(axes, panels, strict=True):
        panel_records = [r for r in records if (r.profile, r.acceptance, r.looks_up, r.quantity) == (
            profile, acceptance, looks_up, quantity)]
        drafts = f", {DRAFTS[looks_up]}" if both else ""
        measured_tasks = {r.task for r in panel_records if r.source == MEASURED}
        task = MEAN if MEAN in measured_tasks else min(measured_tasks)
        panel_records = [r for r in panel_records if r.source != MEASURED or r.task == task]
        _grouped(axis, panel_records, names[quantity], f"{profile}, {acceptance}{drafts}",
                 lambda r: f"T = {r.temperature:g}")
    return figure


def _grouped(axis: Axes, records: Sequence[Record], unit: str, title: str,
             group_of: Callable[[Record], str] = lambda r: r.task) -> None:
    """Draw bars in groups; hollow ones are published."""
    def group(record: Record) -> str:
        return group_of(record) if record.source == MEASURED else f"paper, {record.source}"

    groups = list(dict.fromkeys(map(group, records)))
    methods = list(dict.fromkeys(r.method for r in records if r.source == MEASURED))
    width = 0.84 / len(methods)
    for index, method in enumerate(methods):
        style = style_of(method)
        for record in (r for r in records if r.method == method):
            at = groups.index(group(record)) + (index - (len(methods) - 1) / 2) * width
            is_measured = record.source == MEASURED
            axis.bar(at, _value(record), width * 0.9, color=style.colour if is_measured else "none",
                     edgecolor=style.colour, linewidth=1.0, yerr=record.standard_error, error_kw=ERRORS)
        axis.bar(0, 0, color=style.colour, label=style.label)
    axis.set_xticks(range(len(groups)), [_wrapped(name, _LABELS // len(groups)) for name in groups])
    _finish(axis, unit, title)


def _wrapped(name: str, width: int) -> str:
    """Wrap a name in lines of at most ``width`` letters, also after - and _."""
    return "\n".join(line.replace("_ ", "_") for line in wrap(name.replace("_", "_ "), max(width, 6)))


def _bandwidth(records: Sequence[Record]) -> Figure:
    figure, (axis,) = new_figure(1, _WIDTH, 3.2)
    _lines(axis, [r for r in records if r.quantity == "tokens_per_second"])
    _finish(axis, "tokens/s", _shared_title(records))
    _ticks(axis, records, "link bandwidth (Mbps)", log=True)
    return figure


def _stages(records: Sequence[Record]) -> Figure:
    """Speeds, and ratios with the paper's ranges."""
    titles: dict[Quantity, str] = {
        "tokens_per_second": "tokens/s", "over_autoregressive": "speed / plain decoding",
        "over_stpp": "speed / static tree"}
    quantities: list[Quantity] = [q for q in titles if any(r.quantity == q for r in records)]
    figure, axes = new_figure(len(quantities), _WIDTH, 2.1)
    for axis, quantity in zip(axes, quantities, strict=True):
        _lines(axis, [r for r in records if r.quantity == quantity])
        _finish(axis, titles[quantity], _shared_title(records))
        _ticks(axis, records, "stages")
    return figure


def _law(records: Sequence[Record]) -> Figure:
    figure, (axis,) = new_figure(1, _WIDTH, 3.2)
    _lines(axis, [r for r in records if r.quantity == "acceptance_length"])
    measured = _filter_task([r for r in records if r.source == MEASURED])
    rates = [(_value(r), r.stages) for r in measured if r.quantity == "acceptance"]
    most = max(r.stages for r in records)
    for (rate, stages), line in ((max(rates), "--"), (min(rates), ":")):
        axis.plot(range(1, most + 1), [law(n, rate) for n in range(1, most + 1)], line, color="#777777",
                  linewidth=1, label=f"the law at a = {rate:.3f} (of n = {stages})")
    _finish(axis, "equivalent acceptance length n·N/K", _shared_title(records))
    _ticks(axis, records, "stages n")
    return figure


def _lines(axis: Axes, records: Sequence[Record]) -> None:
    measured = _filter_task([r for r in records if r.source == MEASURED])
    for method in dict.fromkeys(r.method for r in measured):
        points = [(float(r.at), _value(r), r.standard_error) for r in measured if r.method == method]
        draw_curve(axis, method, points, style_of(method).label)
    _published_lines(axis, [r for r in records if r.source != MEASURED])


def _published_lines(axis: Axes, records: Sequence[Record]) -> None:
    """Draw published figures.

    Those of one model have the methods' own markers, hollow, with one entry in the legend. Those of several models,
    which
    measured one method, have a marker and an entry for each.
    """
    sources = list(dict.fromkeys(r.source for r in records))
    for source, method in dict.fromkeys((r.source, r.method) for r in records):
        style, method_records = style_of(method), [r for r in records if (r.source, r.method) == (source, method)]
        marker = style.marker if len(sources) == 1 else _SOURCE_MARKERS[sources.index(source)]
        axis.plot([float(r.at) for r in method_records], [_value(r) for r in method_records], color=style.colour,
                  marker=marker, **HOLLOW)
    for source, marker in zip(sources, _SOURCE_MARKERS, strict=False):
        colour = "#444444" if len(sources) == 1 else style_of(records[0].method).colour
        axis.plot([], [], color=colour, marker=marker, label=f"paper, {source}", **HOLLOW)


def _value(record: Record) -> float:
    assert record.figure is not None, "records without a figure are left out at the start"
    return record.figure


def _filter_task(records: Sequence[Record]) -> list[Record]:
    tasks = {r.task for r in records}
    return [r for r in records if r.task == (MEAN if MEAN in tasks else records[0].task)]


def _ticks(axis: Axes, records: Sequence[Record], label: str, log: bool = False) -> None:
    ticks(axis, sorted({float(r.at) for r in records}), label, log)


def _shared_title(records: Sequence[Record]) -> str:
    measured = _filter_task([r for r in records if r.source == MEASURED])
    return f"{measured[0].profile}, T = {measured[0].temperature:g}, {measured[0].task}"


def _finish(axis: Axes, unit: str, title: str) -> None:
    _, labels = axis.get_legend_handles_labels()
    published = any(label.startswith("paper, ") for label in labels) or any(
        text.get_text().startswith("paper,") for text in axis.get_xticklabels())
    kinds = "; filled: measured, hollow: the paper's" if published else ""
    finish(axis, f"VIRTUAL TIME under {title}{kinds}", unit)


_FIGURES: dict[Kind, Callable[[Sequence[Record]], Figure]] = {
    "speed": _bars, "acceptance": _acceptance, "bandwidth": _bandwidth, "stages": _stages, "law": _law,
}
