"""Benchmarks as tables, for the terminal (rich) and in Markdown.

There are tables of a run's rows, of requests that share the devices, and of sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.segment import Segments
from rich.table import Table

from flowspec_edge.lab.bench.axes import Scalar, Value, label
from flowspec_edge.lab.bench.estimates import MEDIAN, METHOD, SPEEDUP
from flowspec_edge.lab.bench.exactness import MARKS, exactness_text
from flowspec_edge.lab.bench.paper_results import BandwidthCurves, DepthCells
from flowspec_edge.lab.bench.results import BenchReport, Sweep
from flowspec_edge.lab.bench.rows import ReportRow
from flowspec_edge.lab.bench.samples import LOOP, SHORT
from flowspec_edge.lab.bench.styles import style_of
from flowspec_edge.lab.first_token import FirstToken
from flowspec_edge.strategies.registry import groups_note
from flowspec_edge.util.terminal import counted_stages, plain

NO_VALUE = "–"
PUBLISHED = "  published"  # a row of the paper's below one of ours
CONCURRENCY = (
    "A request's speed: its tokens over the time from its arrival to the last of them; total: a group's, "
    "from its first arrival. Slowest share: the lowest speed over the same request's alone. Fairness: the "
    "slowest over the fastest of a group, the lowest. ITL: of all requests together."
)
_ENERGY = {"joules_per_token": "J/token", "joules_per_token_above_idle": "above idle"}
_WIDEST = 1000  # columns; more than any table needs
_BEST, _WORST = "▲", "▼"

Columns = dict[str, Callable[[ReportRow], str]]  # from a heading to a row's cell


def frame(text: Sequence[str], figures: Sequence[str], title: str = "", wide: bool = False) -> Table:
    """Return a table without rows: columns of text on the left, of figures on the right.

    ``wide``: without a space between them.
    """
    table = Table(title=plain(title) or None, title_justify="left", box=SIMPLE_HEAD, show_edge=False,
                  padding=0 if wide else (0, 1, 0, 0), caption_justify="left")
    for name in text:
        table.add_column(plain(name), no_wrap=True)
    for name in figures:
        table.add_column(plain(name), justify="right", no_wrap=True)
    return table


def show(console: Console, table: Table) -> None:
    """Print a table in full: a narrow terminal wraps lines instead of truncating figures."""
    width = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    # print(made, width=…) is limited to the console's width.
    options = console.options.update(width=max(console.width, width))
    console.print(Segments(console.render(table, options)), soft_wrap=True, end="")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the first column on the left, the others on the right; the cells of a column have one width."""
    table = [[cell.replace("|", r"\|") for cell in row] for row in (header, *rows)]
    widths = [max(2, *map(len, column)) for column in zip(*table, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]),
                  *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(table[0]), f"| {' | '.join(rule)} |", *map(line, table[1:])])


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return NO_VALUE if value is None else f"{value:.{digits}f}{unit}"


def first_token_table(first_tokens: Sequence[FirstToken]) -> Table:
    rendered = frame((), ("prompt tokens", "first token s"))
    rendered.add_column("")
    for row in first_tokens:
        rendered.add_row(f"{row.prompt_tokens:,}", number(row.seconds), plain(row.why))
    return rendered


def title(clock: str, profile: str | None, stages: int, temperature: float, strategy: str = "") -> str:
    conditions = f"{timing(clock, profile)}, {counted_stages(stages)}, T = {temperature:g}"
    return f"{strategy}, {conditions}" if strategy else conditions


def timing(clock: str, profile: str | None) -> str:
    if profile is None:
        return "wall clock on this machine"
    return f"VIRTUAL TIME under {profile}" if clock == "virtual" else f"EMULATED {profile}, wall clock"


# ---- a run's rows ----------------------------------------------------------------------------------------

def table(rows: Sequence[ReportRow], caption: str) -> Table:
    """Tabulate the rows in their order.

    The columns of task, energy, errors, medians and loops appear if they have values; concurrent requests
    have others.  ``caption`` also says in which types all was computed.
    """
    several = len({row.task for row in rows}) > 1
    columns, notes = _concurrency_columns(rows), [CONCURRENCY]
    if not columns:
        columns, notes = _columns(rows)
    if "J/token" in columns:
        caption = f"{caption}; J/token: measured, without carrier boards"
    columns |= {"answers ≠": lambda row: _alert(row, row.exactness.answers_text),
                "tokens ≠": lambda row: row.exactness.tokens_text}
    notes += [MARKS, *filter(None, [groups_note(row.strategy for row in rows)])]
    rendered = frame([*["task"] * several, "strategy", "draft"], list(columns), caption, wide=True)
    previous = None
    for row in rows:
        cells = [plain(row.strategy), plain(row.draft or NO_VALUE), *(cell(row) for cell in columns.values())]
        rendered.add_row(*["" if row.task == previous else plain(row.task)] * several, *cells)
        previous = row.task
    rendered.caption = "\n".join(notes) or None
    return rendered


def _columns(rows: Sequence[ReportRow]) -> tuple[Columns, list[str]]:
    """Make the columns of requests that ran one by one, and the notes that explain them."""
    errors = any(row.tokens_per_second_se is not None for row in rows)
    paired = any(row.speedup_median is not None for row in rows)
    has_loop_counts = any(row.repeating is not None for row in rows)
    has_loops = any(row.repeating for row in rows)
    columns: Columns = {"tokens/s": _figure_of("tokens_per_second")}
    if errors:
        columns |= {"±": _figure_of("tokens_per_second_se"), "median": _figure_of("tokens_per_second_median")}
    columns["×chunk_pp"] = lambda row: number(row.speedup, unit="×")
    if paired:
        columns |= {"± ": _figure_of("speedup_se"),
                    "median ": lambda row: number(row.speedup_median, unit="×")}
    columns |= {"ALT": _figure_of("alt", 3),
                "ALR": _figure_of("alr"), "TTFT s": _figure_of("ttft_s"),
                "ITL s": _figure_of("itl_mean_s", 3)}
    if any(row.short for row in rows):
        columns["short"] = lambda row: f"{row.short}/{row.answers}"
    if has_loop_counts:
        columns["loops"] = (
            lambda row: NO_VALUE if row.repeating is None else f"{row.repeating}/{row.answers}")
    if has_loops:
        columns |= {"looping": _figure_of("tokens_per_second_repeating"),
                    "others": _figure_of("tokens_per_second_other")}
    energy = [name for name in _ENERGY if any(getattr(row, name) is not None for row in rows)]
    columns |= {_ENERGY[name]: _figure_of(name) for name in energy}
    notes = [SPEEDUP, *([METHOD, MEDIAN] if errors else [])]
    if "short" in columns:
        notes.append(f"short: {SHORT}")
    if has_loop_counts:
        notes.append(f"loops: answers with {LOOP}" +
                     ("; looping, others: tokens/s of these answers and of all others" if has_loops else ""))
    return columns, notes


def _concurrency_columns(rows: Sequence[ReportRow]) -> Columns:
    """Make the columns of requests that shared the devices; none if they ran one by one."""
    first = rows[0].concurrency if rows else None
    if first is None:
        return {}

    def shared(name: str, digits: int = 2) -> Callable[[ReportRow], str]:
        return lambda row: number(getattr(row.concurrency, name), digits)

    arrivals: Columns = {
        "clients": lambda row: f"{row.concurrency.clients if row.concurrency else NO_VALUE}"}
    if first.arrival_rate:
        arrivals = {"arrivals/s":
                    lambda row: f"{row.concurrency.arrival_rate:g}" if row.concurrency else NO_VALUE}
    return {**arrivals, "total tokens/s": shared("total_tokens_per_second"),
            "slowest share": shared("slowest_share"), "fairness": shared("fairness"),
            "TTFT s": _figure_of("ttft_s"), "ITL p95 s": shared("pooled_itl_p95_s", 3),
            "p99 s": shared("pooled_itl_p99_s", 3)}


def _figure_of(name: str, digits: int = 2) -> Callable[[ReportRow], str]:
    return lambda row: number(getattr(row, name), digits)


def _alert(row: ReportRow, cell: str) -> str:
    return f"[red]{cell}[/red]" if row.exactness.mark == "≠" else cell


def concurrency_markdown(report: BenchReport, only: Collection[str] | None = None) -> str:
    """Return a table for each temperature; ``only`` these strategies."""
    parts = []
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        rows = [row for row in rows_to_show(report, temperature) if not only or row.strategy in only]
        if not rows:
            continue
        caption = title(report.clock, report.profile, report.settings["stages"], temperature)
        columns = _concurrency_columns(rows)
        body = [[style_of(row.strategy).label, row.draft or NO_VALUE, row.task,
                 *(cell(row) for cell in columns.values()), row.exactness.answers_text,
                 row.exactness.tokens_text] for row in rows]
        parts += [f"## {report.settings['model']} model, {caption}",
                  markdown_table(["method", "draft", "task", *columns, "answers ≠", "tokens ≠"], body)]
    note = groups_note(row.strategy for row in report.rows if not only or row.strategy in only)
    return "\n\n".join([*parts, " ".join([f"{CONCURRENCY} {MARKS[0].upper()}{MARKS[1:]}.",
                                          *([f"{note}."] if note else [])])])


def rows_to_show(report: BenchReport, temperature: float) -> list[ReportRow]:
    """Return the rows of one temperature; with several tasks also their means."""
    rows = [row for row in report.rows if row.temperature == temperature]
    if len({row.task for row in rows}) > 1:
        rows += [row for row in report.means if row.temperature == temperature]
    return rows


# ---- sweeps ----------------------------------------------------------------------------------------------

def measured_as(sweep: Sweep) -> str:
    """Return the clock and the links of the figures; virtual and emulated time in capitals."""
    if sweep.clock == "virtual":
        return timing(sweep.clock, sweep.profile)
    links = {"virtual": "virtual links", "namespaces": "shaped links of this machine",
             "cluster": "a cluster's shaped links" if sweep.axis.link else "a cluster's links"}[sweep.links]
    if sweep.emulated:
        return f"EMULATED: wall clock, {links}, real processes that compute as long as {sweep.profile} says"
    return f"wall clock, {links}"


def sweep_title(sweep: Sweep, strategy: str = "") -> str:
    stages = [counted_stages(sweep.settings['stages'])] if sweep.axis.name != "stages" else []
    parts = [strategy, f"tokens/s by {sweep.axis.title}", measured_as(sweep), *stages,
             f"T = {sweep.settings['temperature']:g}"]
    return ", ".join(part for part in parts if part)


def sweep_tables(sweep: Sweep) -> list[tuple[str, Table]]:
    """(caption, table): one table of all strategies, or a grid for each strategy if values are pairs."""
    speeds = sweep.speeds()
    if sweep.axis.grid:
        return [(sweep_title(sweep, name), _grid(rows, sweep.axis.grid)) for name, rows in speeds.items()]
    return [(sweep_title(sweep), _lines(sweep, speeds))] if speeds else []


def sweep_notes(sweep: Sweep) -> list[str]:
    s, lines = sweep.settings, []
    tasks = "; ".join(f"{t['name']}: {t['prompts']} prompt{'s' * (t['prompts'] > 1)}" for t in s["tasks"])
    draft = f"; draft: {s['draft']}" if "draft" in s else ""  # it may be the axis
    lines.append(f"{tasks}; at most {s['max_new_tokens']} new tokens{draft}.")
    samples = [sample for point in sweep.measured_points() for sample in point.report.samples]
    lines.append(exactness_text(samples, s))
    if any(row.tokens_per_second_se is not None for rows in sweep.speeds().values() for row in rows.values()):
        lines += [f"{METHOD}.", f"In brackets: {MEDIAN}."]
    lines += _short(sweep)
    lines += _loops(sweep)
    if note := groups_note(sweep.speeds()):
        lines.append(f"{note}.")
    if sweep.axis.grid:
        lines += [_extremes(name, rows, sweep.axis.grid) for name, rows in sweep.speeds().items()]
    elif len(sweep.points) > 1 and sweep.axis.share:
        first, last = (sweep.label_of(sweep.points[at].value) for at in (0, -1))
        lines.append(f"{sweep.axis.share}: tokens/s at {last} as a share of those at {first}.")
    if sweep.axis.note:
        lines.append(sweep.axis.note)
    match sweep.published:
        case BandwidthCurves() as theirs:
            lines.append(f"published: {theirs.source}; {theirs.model}, not measured here.")
        case DepthCells() as theirs:
            lines.append(published_depths(theirs))
    if not sweep.complete:
        lines.append("INCOMPLETE: some values have not been measured.")
    return lines


def _short(sweep: Sweep) -> list[str]:
    rows = [row for speeds in sweep.speeds().values() for row in speeds.values()]
    if not any(row.short for row in rows):
        return []
    counts = " or ".join(dict.fromkeys(f"{row.short} of {row.answers}" for row in rows))
    return [f"{SHORT[0].upper()}{SHORT[1:]}: {counts} of a strategy."]


def _loops(sweep: Sweep) -> list[str]:
    """How many answers repeat themselves; no axis changes the text."""
    rows = [row for speeds in sweep.speeds().values() for row in speeds.values()]
    if not rows or any(row.repeating is None for row in rows):
        return []
    counts = " or ".join(dict.fromkeys(f"{row.repeating} of {row.answers}" for row in rows))
    return [f"answers of a strategy that repeat themselves: {counts} ({LOOP})."]


def published_depths(published: DepthCells) -> str:
    best, worst = published.best, published.worst
    share = worst.tokens_per_second / best.tokens_per_second
    return (f"published: {published.source}; {published.model}, not measured here: best ({best.depth}, "
            f"{best.expand_depth}) {best.tokens_per_second:.2f}, worst ({worst.depth}, {worst.expand_depth}) "
            f"{worst.tokens_per_second:.2f}, {share:.0%} of it.")


def best_and_worst(rows: Mapping[Value, ReportRow]) -> tuple[Value, Value] | None:
    """Return the values with the most and the fewest tokens/s; None if no row has a speed."""
    by_value = {value: speed for value, row in rows.items() if (speed := row.tokens_per_second) is not None}
    if not by_value:
        return None
    return max(by_value, key=lambda value: by_value[value]), min(by_value, key=lambda value: by_value[value])


def _lines(sweep: Sweep, speeds: Mapping[str, Mapping[Value, ReportRow]]) -> Table:
    values = [point.value for point in sweep.points if point.value is not None]
    share = [sweep.axis.share] if sweep.axis.share else []
    rendered = frame(["strategy", "draft"], [*map(sweep.axis.text, values), *share])
    for name, rows in speeds.items():
        measured = [rows.get(value) for value in values]
        figures = [row.tokens_per_second if row else None for row in measured]
        draft = next(row.draft for row in rows.values())
        rendered.add_row(plain(name), plain(draft or NO_VALUE), *map(_speed, measured),
                         *(_retained(figures) for _ in share))
        if isinstance(sweep.published, BandwidthCurves):
            curve = sweep.published.curve(name)
            published = [curve.get(value) if isinstance(value, int | float) else None for value in values]
            rendered.add_row(f"[dim]{PUBLISHED}[/dim]", "", *(f"[dim]{number(speed)}[/dim]" for speed in published),
                             f"[dim]{_retained(published)}[/dim]")
    if any(point.measured_mbps for point in sweep.points):
        slowest = [min(point.measured_mbps) if point.measured_mbps else None for point in sweep.points]
        rendered.add_section()
        rendered.add_row("measured Mbps, slowest device", "", *map(number, slowest), *("" for _ in share))
    return rendered


def _grid(rows: Mapping[Value, ReportRow], names: tuple[str, str]) -> Table:
    """Return a row for each first value of the pairs, a column for each second one."""
    firsts, seconds = grid_axes(rows)
    rendered = frame([" \\ ".join(names)], [label(second) for second in seconds])
    ends = best_and_worst(rows)
    marks = {ends[1]: _WORST, ends[0]: _BEST} if ends and ends[0] != ends[1] else {}
    for first in firsts:
        cells = [f"{_speed(rows.get((first, second)))}{marks.get((first, second), ' ')}" for second in seconds]
        rendered.add_row(label(first), *cells)
    return rendered


def grid_axes(rows: Mapping[Value, ReportRow]) -> tuple[list[Scalar], list[Scalar]]:
    """Return the pairs' first values and their second ones, each in order."""
    pairs = [value for value in rows if isinstance(value, tuple)]
    firsts, seconds = {first for first, _ in pairs}, {second for _, second in pairs}
    return sorted(firsts), sorted(seconds)  # those of one parameter are of one type


def _extremes(name: str, rows: Mapping[Value, ReportRow], names: tuple[str, str]) -> str:
    ends = best_and_worst(rows)
    if ends is None:
        return f"{name}: no answer has a speed."
    best, worst = ends
    most, least = (rows[value].tokens_per_second or 0.0 for value in ends)
    return (f"{name}: {_BEST} best ({', '.join(names)}) = {label(best)} {most:.2f}, {_WORST} worst {label(worst)} "
            f"{least:.2f}, {least / most:.0%} of it.")


def _speed(row: ReportRow | None) -> str:
    if row is None or row.speed is None:
        return NO_VALUE
    return _alert(row, f"{row.speed.text()} {row.exactness.mark}".rstrip())


def _retained(speeds: Sequence[float | None]) -> str:
    """Return the last value's tokens/s over the first one's."""
    if len(speeds) < 2 or not speeds[0] or speeds[-1] is None:
        return NO_VALUE
    return f"{speeds[-1] / speeds[0]:.1%}"
