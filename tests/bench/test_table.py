"""Tables have every figure, however narrow the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

from reportkit import report
from rich.console import Console

from flowspec_edge.bench.rows import ReportRow
from flowspec_edge.bench.tables import show, table


def test_no_figure_is_truncated_in_a_narrow_terminal() -> None:
    rows = [replace(row, tokens_per_second=1234.56, tokens_per_second_se=23.45, ttft_s=6789.01, alr=7654.32)
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


def test_names_of_files_are_shown_as_they_are_and_do_nothing_to_the_terminal() -> None:
    row = report(["chunk_pp"], ["qa"], [0.0]).rows[0]
    rows = [replace(row, strategy="[red]mine[/red]", task="a\x1b]0;title\x07"), replace(row, task="[/b]")]
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True, color_system=None)
    show(console, table(rows, "under [/x] \x9b"))
    for shown in ("[red]mine[/red]", r"a\x1b]0;title\x07", "[/b]", r"under [/x] \x9b"):
        assert shown in file.getvalue()
    assert not {"\x07", "\x9b"} & {*file.getvalue()}


def test_joules_have_columns_if_measured() -> None:
    plain = report(["chunk_pp", "flowspec"], ["qa"], [0.0]).rows

    def printed(rows: list[ReportRow]) -> list[str]:
        file = io.StringIO()
        show(Console(file=file, width=200), table(rows, "wall clock"))
        return [line.rstrip() for line in file.getvalue().splitlines()]

    lines = printed([replace(plain[0], joules_per_token=4.567, joules_per_token_above_idle=-0.004), plain[1]])
    assert lines[0] == "wall clock; J/token: measured, without carrier boards"
    header, first, second = (line.split() for line in (lines[1], lines[3], lines[4]))
    assert header[-4:] == ["J/token", "above", "idle", "tokens"]
    assert first[-3:] == ["4.57", "-0.00", "identical"]
    assert second[-3:] == ["–", "–", "identical"]
    assert not any("J/token" in line for line in printed(plain))
