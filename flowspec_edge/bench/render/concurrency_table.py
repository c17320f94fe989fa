"""Figures of requests that share the devices, as a table for people and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flowspec_edge.bench.render.markdown import markdown_table
from flowspec_edge.bench.render.styles import style_of
from flowspec_edge.bench.render.table import texts, title
from flowspec_edge.bench.results.report import BenchReport
from flowspec_edge.bench.results.rows import ReportRow
from flowspec_edge.util.terminal import plain

DEFINITION = (
    "A request's speed: its tokens over the time from its arrival to the last of them; total: a group's, "
    "from its first arrival. Slowest share: the lowest speed over the same request's alone. Fairness: the "
    "slowest over the fastest of a group, the lowest. ITL: of all requests together."
)


def concurrency_table(rows: Sequence[ReportRow], caption: str) -> Table:
    """The rows, which must have ``concurrency``, in their order."""
    several = len({row.task for row in rows}) > 1
    made = Table(title=plain(caption), title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False,
                 caption=DEFINITION, caption_justify="left")
    if several:
        made.add_column("task", no_wrap=True)
    made.add_column("strategy", no_wrap=True)
    made.add_column("draft", no_wrap=True)
    for column in _columns(rows):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("tokens", no_wrap=True)
    previous = None
    for row in rows:
        cells = [plain(row.strategy), plain(row.draft or "–"), *_cells(row), texts(row)]
        made.add_row(*["" if row.task == previous else plain(row.task)] * several, *cells)
        previous = row.task
    return made


def concurrency_markdown(report: BenchReport, only: Collection[str] | None = None) -> str:
    """A table for each temperature; ``only`` these strategies."""
    parts = []
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        rows = [row for row in rows_to_show(report, temperature) if not only or row.strategy in only]
        if not rows:
            continue
        caption = title(report.clock, report.profile, report.settings["stages"], temperature)
        body = [[style_of(row.strategy).label, row.draft or "–", row.task, *_cells(row),
                 "identical" if row.identical else "**≠**"] for row in rows]
        parts += [f"## {report.settings['model']} model, {caption}",
                  markdown_table(["method", "draft", "task", *_columns(rows), "texts"], body)]
    return "\n\n".join([*parts, DEFINITION])


def rows_to_show(report: BenchReport, temperature: float) -> list[ReportRow]:
    """Of one temperature; with several tasks also their means."""
    rows = [row for row in report.rows if row.temperature == temperature]
    if len({row.task for row in rows}) > 1:
        rows += [row for row in report.means if row.temperature == temperature]
    return rows


def _columns(rows: Sequence[ReportRow]) -> list[str]:
    first = rows[0].concurrency
    return ["arrivals/s" if first and first.arrival_rate else "clients", "total tokens/s", "slowest share",
            "fairness", "TTFT s", "ITL p95 s", "p99 s"]


def _cells(row: ReportRow) -> list[str]:
    figures = row.concurrency
    assert figures is not None
    arrivals = str(figures.clients) if figures.clients else f"{figures.arrival_rate:g}"
    return [arrivals, *(_number(value, 2) for value in (
        figures.total_tokens_per_second, figures.slowest_share, figures.fairness, row.ttft_s)),
        _number(figures.pooled_itl_p95_s, 3), _number(figures.pooled_itl_p99_s, 3)]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
