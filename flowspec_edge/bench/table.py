"""Rows as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.segment import Segments
from rich.table import Table

from flowspec_edge.bench.report import Row

_WIDEST = 1000  # columns; more than any table needs


def title(clock: str, profile: str | None, stages: int, temperature: float, strategy: str = "") -> str:
    """What the figures are; figures in virtual time are always labelled so."""
    what = f"{timing(clock, profile)}, {stages} stages, T = {temperature:g}"
    return f"{strategy}, {what}" if strategy else what


def timing(clock: str, profile: str | None) -> str:
    """Whose time a figure is in; processes under a profile emulate it."""
    if profile is None:
        return "wall clock on this machine"
    return f"VIRTUAL TIME under {profile}" if clock == "virtual" else f"EMULATED {profile}, wall clock"


def show(console: Console, made: Table) -> None:
    """Print a table whole: a narrow terminal wraps its lines, but no figure is cut short."""
    needed = console.measure(made, options=console.options.update(max_width=_WIDEST)).maximum
    # Not print(made, width=…): that would not go beyond the console.
    options = console.options.update(width=max(console.width, needed))
    console.print(Segments(console.render(made, options)), soft_wrap=True, end="")


def table(rows: Sequence[Row], caption: str) -> Table:
    """The rows in the order given, with their task if there are several; speedup is over Chunk-PP.

    Time to first token; inter-token latency, its mean and 95th percentile.  Sums are in the JSON.
    """
    several = len({row.task for row in rows}) > 1
    repeated = any(row.tokens_per_second_sd is not None for row in rows)
    made = Table(title=caption, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    if several:
        made.add_column("task", no_wrap=True)
    made.add_column("strategy", no_wrap=True)
    columns = ["tokens/s", "±", "speedup", "ALT", "ALR", "rounds", "TTFT s", "ITL s", "p95 s"]
    if not repeated:
        columns.remove("±")
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("tokens", no_wrap=True)
    previous = None
    for row in rows:
        cells = [row.strategy, f"{row.tokens_per_second:.2f}"]
        if repeated:
            cells.append("–" if row.tokens_per_second_sd is None else f"{row.tokens_per_second_sd:.2f}")
        cells += ["–" if row.speedup is None else f"{row.speedup:.2f}×", f"{row.alt:.3f}", f"{row.alr:.2f}",
                  str(row.rounds), f"{row.ttft_s:.2f}", f"{row.itl_mean_s:.3f}", f"{row.itl_p95_s:.3f}",
                  _texts(row)]
        if several:
            cells.insert(0, "" if row.task == previous else row.task)
        previous = row.task
        made.add_row(*cells)
    return made


def _texts(row: Row) -> str:
    if not row.identical:
        return "[red]DIFFERENT[/red]"
    return f"{row.near_ties} near tie{'s'[:row.near_ties > 1]}" if row.near_ties else "identical"
