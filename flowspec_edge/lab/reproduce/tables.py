"""The cells of a reproduced table from its records, in the paper's arrangement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from flowspec_edge.lab.bench.rows import MEAN
from flowspec_edge.lab.bench.styles import style_of
from flowspec_edge.lab.bench.tables import NO_VALUE, frame, number
from flowspec_edge.lab.reproduce.catalogue import Kind
from flowspec_edge.lab.reproduce.records import DRAFTS, MEASURED, Quantity, Record
from flowspec_edge.util.terminal import plain


@dataclass(frozen=True)
class PaperPanel:
    """A table under a heading; the first column is text, the others are figures."""

    heading: str
    header: list[str]
    rows: list[list[str]]


def panels_of(kind: Kind, records: Sequence[Record]) -> list[PaperPanel]:
    return _BUILDERS[kind](records)


def _first(records: Sequence[Record], quantity: Quantity, **fields: object) -> str:
    """Return the figure of the record with these fields."""
    for record in records:
        if record.quantity == quantity and all(getattr(record, k) == v for k, v in fields.items()):
            if record.estimate is None:
                return NO_VALUE
            return f"{record.estimate.text(3 if quantity == 'acceptance' else 2)} {record.mark}".rstrip()
    return NO_VALUE


def _beside(published: Sequence[Record], measured: Sequence[Record]) -> str:
    """Return the published figure, followed in brackets by the ratio ours / published."""
    if not published or published[0].figure is None:
        return NO_VALUE
    figure = measured[0].figure if measured else None
    over = "" if figure is None else f" [{figure / published[0].figure:.2f}]"
    return f"{published[0].figure:.2f}{over}"


def _matching(records: Sequence[Record], **fields: object) -> list[Record]:
    return [record for record in records if all(getattr(record, k) == v for k, v in fields.items())]


def _distinct(records: Sequence[Record], field: str) -> list[object]:
    return list(dict.fromkeys(getattr(record, field) for record in records))


def _heading(profile: object, temperature: object = None, acceptance: object = "", looks_up: bool | None = None,
             ) -> str:
    parts = [f"virtual time under {profile}", f"T = {temperature:g}" if temperature is not None else "",
             str(acceptance), "" if looks_up is None else DRAFTS[looks_up]]
    return ", ".join(filter(None, parts))


def _speed_panels(records: Sequence[Record]) -> list[PaperPanel]:
    """Methods × tasks, tokens/s and SR; the paper's means in the last columns."""
    panels = []
    both = len(_distinct(records, "looks_up")) > 1
    for conditions in dict.fromkeys(r.conditions for r in records):
        profile, acceptance, looks_up, temperature = conditions
        matching_records = _matching(records, conditions=conditions)
        measured = _matching(matching_records, source=MEASURED)
        tasks, papers = _distinct(measured, "task"), [s for s in _distinct(matching_records, "source") if s != MEASURED]
        header = ["method", "draft", *(cell for title in (*map(str, tasks), *(f"paper, {p}" for p in papers))
                                       for cell in (title, "SR"))]
        quantities: tuple[Quantity, ...] = ("tokens_per_second", "speedup")
        rows = [[style_of(str(method)).label, _draft(measured, method),
                 *(_first(measured, quantity, task=task, method=method) for task in tasks
                   for quantity in quantities),
                 *(_beside(_matching(matching_records, source=source, quantity=quantity, method=method),
                           _matching(measured, task=_whole(measured), quantity=quantity, method=method))
                   for source in papers for quantity in quantities)]
                for method in _distinct(measured, "method")]
        heading_start = _heading(profile, temperature, acceptance, looks_up if both else None)
        panels.append(PaperPanel(heading_start, header, rows))
        others = [r for r in measured if r.quantity in ("tokens_per_second_other", "speedup_other")]
        if others:
            tasks = _distinct(others, "task")
            rows = [[style_of(str(method)).label, _draft(measured, method),
                     *(_first(others, quantity, task=task, method=method) for task in tasks
                       for quantity in ("tokens_per_second_other", "speedup_other"))]
                    for method in _distinct(others, "method")]
            heading = f"{heading_start}, without answers that repeat themselves"
            header = ["method", "draft", *(cell for task in tasks for cell in (str(task), "SR"))]
            panels.append(PaperPanel(heading, header, rows))
    return panels


def _acceptance_panels(records: Sequence[Record]) -> list[PaperPanel]:
    panels = []
    both = len(_distinct(records, "looks_up")) > 1
    for profile, acceptance, looks_up in dict.fromkeys(
            (r.profile, r.acceptance, r.looks_up) for r in records):
        matching_records = _matching(records, profile=profile, acceptance=acceptance, looks_up=looks_up)
        measured = _matching(matching_records, source=MEASURED)
        temperatures, task = _distinct(measured, "temperature"), _whole(measured)
        papers = [source for source in _distinct(matching_records, "source") if source != MEASURED]
        titles = (*(f"T = {t:g}" for t in temperatures), *(f"paper, {source}" for source in papers))
        header = ["method", "draft", *(f"{name}, {title}" for title in titles for name in ("ALT", "ALR"))]
        quantities: tuple[Quantity, ...] = ("alt", "alr")
        rows = [[style_of(str(method)).label, _draft(measured, method),
                 *(_first(measured, quantity, method=method, task=task, temperature=t) for t in temperatures
                   for quantity in quantities),
                 *(_beside(_matching(matching_records, source=source, quantity=quantity, method=method),
                           _matching(measured, task=task, quantity=quantity, method=method))
                   for source in papers for quantity in quantities)]
                for method in _distinct(measured, "method")]
        heading = _heading(profile, acceptance=acceptance, looks_up=looks_up if both else None)
        panels.append(PaperPanel(heading, header, rows))
    return panels


def _draft(measured: Sequence[Record], method: object) -> str:
    return _matching(measured, method=method)[0].draft or NO_VALUE


def _whole(records: Sequence[Record]) -> object:
    """Return the mean of all tasks, or the only task."""
    tasks = _distinct(records, "task")
    return MEAN if MEAN in tasks else tasks[0]


def _bandwidth_panels(records: Sequence[Record]) -> list[PaperPanel]:
    measured = [r for r in records if r.source == MEASURED]
    values, task = _distinct(measured, "at"), _whole(measured)
    rows = []
    for method in _distinct(measured, "method"):
        label = style_of(str(method)).label
        rows.append([label, _draft(measured, method), *(
            _first(measured, "tokens_per_second", method=method, at=at, task=task) for at in values)])
        for source in (s for s in _distinct(records, "source") if s != MEASURED):
            rows.append([f"{label}, paper, {source}", "", *(
                _beside(_matching(records, source=source, method=method, at=at),
                        _matching(measured, quantity="tokens_per_second", method=method, at=at, task=task))
                for at in values)])
    heading = f"tokens/s, {_heading(measured[0].profile, measured[0].temperature)}"
    return [PaperPanel(heading, ["method", "draft", *(f"{at} Mbps" for at in values)], rows)]


def _depth_panels(records: Sequence[Record]) -> list[PaperPanel]:
    """d0 × d_exp, with the paper's cells in brackets."""
    measured = [r for r in records if r.source == MEASURED]
    task = _whole(measured)
    cells = {tuple(map(int, r.at.split(","))): r for r in measured
             if (r.quantity, r.task) == ("tokens_per_second", task)}
    published_cells = {tuple(map(int, r.at.split(","))): r for r in records if r.source != MEASURED}
    depths, expansions = (sorted({key[i] for key in cells}) for i in (0, 1))

    def cell(depth: int, expansion: int) -> str:
        measured_cell, published = cells.get((depth, expansion)), published_cells.get((depth, expansion))
        text = measured_cell.estimate.text() if measured_cell and measured_cell.estimate else NO_VALUE
        return f"{text}; {_beside([published], [measured_cell] if measured_cell else [])}" if published else text

    rows = [[f"d0 = {depth}", *(cell(depth, e) for e in expansions)] for depth in depths]
    heading = (f"tokens/s of FlowSpec, drafts of {measured[0].draft}, "
               f"{_heading(measured[0].profile, measured[0].temperature)}; second figure: the paper's")
    return [PaperPanel(heading, ["", *(f"d_exp = {e}" for e in expansions)], rows)]


def _stages_panels(records: Sequence[Record]) -> list[PaperPanel]:
    measured = [r for r in records if r.source == MEASURED]
    values, task = _distinct(measured, "at"), _whole(measured)
    panels = []
    headings: dict[Quantity, str] = {
        "tokens_per_second": "tokens/s", "over_autoregressive": "speed over plain decoding (PP)",
        "over_stpp": "speed over a static tree (STPP)"}
    for quantity, heading in headings.items():
        rows = [[style_of(str(method)).label, _draft(measured, method),
                 *(_first(measured, quantity, method=method, at=at, task=task) for at in values)]
                for method in _distinct(measured, "method")]
        for source in (s for s in _distinct(records, "source") if s != MEASURED):
            ranges = {at: [number(r.figure) for r in records if (r.source, r.at, r.quantity) == (
                source, at, quantity)] for at in values}
            if any(ranges.values()):
                rows.append([f"PipeDec, paper, {source}", "", *(" to ".join(ranges[at]) or NO_VALUE
                                                            for at in values)])
        panels.append(PaperPanel(f"{heading}, {_heading(measured[0].profile, measured[0].temperature)}",
                                 ["method", "draft", *(f"{at} stages" for at in values)], rows))
    return panels


def _law_panels(records: Sequence[Record]) -> list[PaperPanel]:
    measured = [r for r in records if r.source == MEASURED]
    task, papers = _whole(measured), [s for s in _distinct(records, "source") if s != MEASURED]
    rows = [[f"n = {at}", *(_first(measured, quantity, at=at, task=task)
                            for quantity in ("acceptance", "acceptance_length", "law")),
             *(_first(records, "acceptance_length", source=source, at=at) for source in papers)]
            for at in _distinct(measured, "at")]
    header = ["stages", "acceptance a", "n·N/K", "n/(n(1−a)+a)", *(f"paper, {s}" for s in papers)]
    return [PaperPanel(f"{_heading(measured[0].profile, measured[0].temperature)}", header, rows)]


_BUILDERS: dict[Kind, Callable[[Sequence[Record]], list[PaperPanel]]] = {
    "speed": _speed_panels, "acceptance": _acceptance_panels, "bandwidth": _bandwidth_panels,
    "depth": _depth_panels, "stages": _stages_panels, "law": _law_panels,
}


def terminal(panel: PaperPanel) -> Table:
    table = frame(panel.header[:1], panel.header[1:], panel.heading)
    for row in panel.rows:
        table.add_row(*map(plain, row))
    return table
