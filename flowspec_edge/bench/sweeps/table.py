"""A sweep as tables for the terminal: strategies × values, or a grid of tree depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flowspec_edge.bench.render.table import timing
from flowspec_edge.bench.results.axes import Value, label
from flowspec_edge.bench.results.estimates import METHOD
from flowspec_edge.bench.results.paper_results import BandwidthCurves, DepthCells
from flowspec_edge.bench.results.report import Sweep
from flowspec_edge.bench.results.rows import ReportRow
from flowspec_edge.bench.run.repetition import DEFINITION
from flowspec_edge.util.terminal import plain

PUBLISHED = "  published"  # a row of the paper's below one of ours
_NOTHING = "–"
_BEST, _WORST = "▲", "▼"


def measured_as(sweep: Sweep) -> str:
    """The clock and the links of the figures; virtual and emulated time in capitals."""
    if sweep.clock == "virtual":
        return timing(sweep.clock, sweep.profile)
    where = {"virtual": "virtual links", "namespaces": "shaped links of this machine",
             "cluster": "a cluster's shaped links"}[sweep.links]
    if sweep.emulated:
        return f"EMULATED: wall clock, {where}, real processes that compute as long as {sweep.profile} says"
    return f"wall clock, {where}"


def title(sweep: Sweep, strategy: str = "") -> str:
    stages = [f"{sweep.settings['stages']} stages"] if sweep.axis.name != "stages" else []
    parts = [strategy, f"tokens/s by {sweep.axis.title}", measured_as(sweep), *stages,
             f"T = {sweep.settings['temperature']:g}"]
    return ", ".join(part for part in parts if part)


def tables(sweep: Sweep) -> list[tuple[str, Table]]:
    """(caption, table): one table of all strategies, or on the axis "depth" a grid for each strategy."""
    speeds = sweep.speeds()
    if sweep.axis.name == "depth":
        return [(title(sweep, name), _grid(found)) for name, found in speeds.items()]
    return [(title(sweep), _lines(sweep, speeds))] if speeds else []


def notes(sweep: Sweep) -> list[str]:
    s, found = sweep.settings, []
    tasks = "; ".join(f"{t['name']}: {t['prompts']} prompt{'s' * (t['prompts'] > 1)}" for t in s["tasks"])
    found.append(f"{tasks}; at most {s['max_new_tokens']} new tokens; draft: {s['draft']}.")
    if any(row.tokens_per_second_se is not None for rows in sweep.speeds().values() for row in rows.values()):
        found.append(f"{METHOD}.")
    found += _loops(sweep)
    if sweep.axis.name == "depth":
        found += [_extremes(name, rows) for name, rows in sweep.speeds().items()]
    elif len(sweep.points) > 1:
        first, last = (sweep.where(sweep.points[at].value) for at in (0, -1))
        found.append(f"{sweep.axis.share}: tokens/s at {last} as a share of those at {first}.")
    if sweep.axis.note:
        found.append(sweep.axis.note)
    match sweep.published:
        case BandwidthCurves() as theirs:
            found.append(f"published: {theirs.source}; {theirs.model}, not measured here.")
        case DepthCells() as theirs:
            found.append(published_depths(theirs))
    if not sweep.complete:
        found.append("INCOMPLETE: some values have not been measured.")
    return found


def _loops(sweep: Sweep) -> list[str]:
    """How many answers repeat themselves; no axis changes the text."""
    rows = [row for speeds in sweep.speeds().values() for row in speeds.values()]
    if not rows or any(row.repeating is None for row in rows):
        return []
    counts = " or ".join(dict.fromkeys(f"{row.repeating} of {row.answers}" for row in rows))
    return [f"answers of a strategy that repeat themselves: {counts} ({DEFINITION})."]


def published_depths(theirs: DepthCells) -> str:
    best, worst = theirs.best, theirs.worst
    share = worst.tokens_per_second / best.tokens_per_second
    return (f"published: {theirs.source}; {theirs.model}, not measured here: best ({best.depth}, "
            f"{best.expand_depth}) {best.tokens_per_second:.2f}, worst ({worst.depth}, {worst.expand_depth}) "
            f"{worst.tokens_per_second:.2f}, {share:.0%} of it.")


def best_and_worst(rows: Mapping[Value, ReportRow]) -> tuple[Value, Value]:
    return (max(rows, key=lambda value: rows[value].tokens_per_second),
            min(rows, key=lambda value: rows[value].tokens_per_second))


def _lines(sweep: Sweep, speeds: Mapping[str, Mapping[Value, ReportRow]]) -> Table:
    values = [point.value for point in sweep.points if point.value is not None]
    made = _table("strategy", [sweep.axis.text(value) for value in values], "draft")
    made.add_column(sweep.axis.share, justify="right", no_wrap=True)
    for name, rows in speeds.items():
        ours = [rows.get(value) for value in values]
        figures = [row.tokens_per_second if row else None for row in ours]
        draft = next(row.draft for row in rows.values())
        made.add_row(plain(name), plain(draft or _NOTHING), *map(_speed, ours), _retained(figures))
        if isinstance(sweep.published, BandwidthCurves):
            curve = sweep.published.curve(name)
            theirs = [curve.get(value) if not isinstance(value, tuple) else None for value in values]
            made.add_row(f"[dim]{PUBLISHED}[/dim]", "", *(f"[dim]{_figure(speed)}[/dim]" for speed in theirs),
                         f"[dim]{_retained(theirs)}[/dim]")
    if any(point.measured_mbps for point in sweep.points):
        slowest = [min(point.measured_mbps) if point.measured_mbps else None for point in sweep.points]
        made.add_section()
        made.add_row("measured Mbps, slowest device", "", *map(_figure, slowest), "")
    return made


def _grid(rows: Mapping[Value, ReportRow]) -> Table:
    depths, expansions = grid_axes(rows)
    made = _table("d0 \\ d_exp", [str(expansion) for expansion in expansions])
    best, worst = best_and_worst(rows)
    marks = {worst: _WORST, best: _BEST} if best != worst else {}
    for depth in depths:
        cells = [f"{_speed(rows.get((depth, e)))}{marks.get((depth, e), ' ')}" for e in expansions]
        made.add_row(str(depth), *cells)
    return made


def grid_axes(rows: Mapping[Value, ReportRow]) -> tuple[list[int], list[int]]:
    pairs = [value for value in rows if isinstance(value, tuple)]
    return sorted({depth for depth, _ in pairs}), sorted({expansion for _, expansion in pairs})


def _extremes(name: str, rows: Mapping[Value, ReportRow]) -> str:
    best, worst = best_and_worst(rows)
    most, least = rows[best].tokens_per_second, rows[worst].tokens_per_second
    return (f"{name}: {_BEST} best (d0, d_exp) = {label(best)} {most:.2f}, {_WORST} worst {label(worst)} "
            f"{least:.2f}, {least / most:.0%} of it.")


def _table(first: str, columns: Sequence[str], second: str = "") -> Table:
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for text in filter(None, (first, second)):
        made.add_column(text, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def _speed(row: ReportRow | None) -> str:
    if row is None:
        return _NOTHING
    spread = "" if row.tokens_per_second_se is None else f" ± {row.tokens_per_second_se:.2f}"
    return f"{row.tokens_per_second:.2f}{spread}{'' if row.identical else ' [red]≠[/red]'}"


def _figure(speed: float | None) -> str:
    return _NOTHING if speed is None else f"{speed:.2f}"


def _retained(speeds: Sequence[float | None]) -> str:
    """The last value's tokens/s over the first one's."""
    if len(speeds) < 2 or not speeds[0] or speeds[-1] is None:
        return _NOTHING
    return f"{speeds[-1] / speeds[0]:.1%}"
