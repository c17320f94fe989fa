from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column on the left, the others on the right; the cells of a column have one width."""
    table = [[cell.replace("|", r"\|") for cell in row] for row in (header, *rows)]
    widths = [max(2, *map(len, column)) for column in zip(*table, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]),
                  *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(table[0]), f"| {' | '.join(rule)} |", *map(line, table[1:])])
