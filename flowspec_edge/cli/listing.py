"""``flowspec strategies`` and ``flowspec profiles``: what there is, one line each."""

from __future__ import annotations


def strategies() -> None:
    """List the strategies."""
    from flowspec_edge.strategies.registry import STRATEGIES

    print_columns([(name, cls.summary) for name, cls in STRATEGIES.items()])


def profiles() -> None:
    """List the profiles of devices and testbeds."""
    from flowspec_edge.config import load_profile, profile_names

    found = [load_profile(name) for name in profile_names()]
    print_columns([(p.name, p.kind, p.provenance, p.summary) for p in found])


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Left-aligned columns, two spaces apart; the last one is free."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
