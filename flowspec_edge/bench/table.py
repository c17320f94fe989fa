"""A report as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flowspec_edge.bench.runner import Row


def title(clock: str, profile: str | None, stages: int, temperature: float) -> str:
    """What the figures are; figures in virtual time are always labelled so."""
    where = f"VIRTUAL TIME under {profile}" if clock == "virtual" else "wall clock on this machine"
    return f"{where}, {stages} stages, T = {temperature:g}"


def table(rows: Sequence[Row], caption: str) -> Table:
    """The rows in the order given; speedup is the ratio to Chunk-PP's tokens/s."""
    made = Table(title=caption, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    made.add_column("strategy", no_wrap=True)
    for column in ("tokens/s", "speedup", "ALT", "ALR", "turns", "rounds", "tokens"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("tokens are", no_wrap=True)
    for row in rows:
        made.add_row(
            row.strategy, f"{row.tokens_per_second:.2f}",
            "–" if row.speedup is None else f"{row.speedup:.2f}×",
            f"{row.alt:.3f}", f"{row.alr:.2f}", f"{row.turns:.0f}", str(row.rounds), str(row.tokens),
            "identical" if row.identical else "[red]DIFFERENT[/red]",
        )
    return made
