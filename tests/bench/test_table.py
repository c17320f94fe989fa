"""Tables for people: every figure is there, however narrow the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

from reportkit import report
from rich.console import Console

from flowspec_edge.bench.table import show, table


def test_no_figure_is_cut_short_in_a_narrow_terminal() -> None:
    rows = [replace(row, tokens_per_second=1234.56, tokens_per_second_sd=23.45, ttft_s=6789.01, alr=7654.32)
            for row in report(["chunk_pp", "flowspec_no_sbd"], ["translation", "math_reasoning"], [0.0]).rows]
    printed = []
    for width in (40, 300):
        file = io.StringIO()
        show(Console(file=file, width=width), table(rows, "VIRTUAL TIME"))
        printed.append([line.rstrip() for line in file.getvalue().splitlines()])
    lines, wide = printed
    assert lines == wide
    (row,) = (line for line in lines if line.startswith("math_reasoning"))
    for figure in ("1234.56", "23.45", "6789.01", "7654.32", "chunk_pp", "identical"):
        assert figure in row.split()
