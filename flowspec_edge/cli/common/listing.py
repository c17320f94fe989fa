"""``flowspec strategies`` and ``flowspec profiles``, and the columns in which lists are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowspec_edge.util.terminal import plain, printable

if TYPE_CHECKING:
    from rich.table import Table


def strategies() -> None:
    """List the strategies, those of installed packages included (entry points "flowspec.strategies")."""
    from flowspec_edge.strategies.registry import strategy_class, strategy_names

    print_columns([(name, strategy_class(name).summary) for name in strategy_names()])


def profiles() -> None:
    """List the profiles of devices and testbeds."""
    from flowspec_edge.config import load_profile, profile_names

    found = [load_profile(name) for name in profile_names()]
    print_columns([(p.name, p.kind, p.provenance, p.summary) for p in found])


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Left-aligned, two spaces apart."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def figures_table(title: str | None, names: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    """Columns of names, then right-aligned ones."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title and plain(title), title_justify="left", box=SIMPLE_HEAD, padding=0,
                  show_edge=False)
    for column in (*names, *figures):
        table.add_column(column, justify="right" if column in figures else "left", no_wrap=True)
    return table
