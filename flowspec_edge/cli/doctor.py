"""``flowspec doctor``: is this machine fit to be a board of a cluster?

Knows how findings are shown.  Does not know what is checked (``fleet.checkup``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flowspec_edge.fleet.checkup import Finding

_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[red]failed[/red]",
          "unknown": "[dim]unknown[/dim]"}


def doctor(
    storage: Annotated[Path | None, typer.Option(
        "--storage", help="Where releases and shards are to lie; by default the home directory.",
        metavar="DIR", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not a table.")] = False,
) -> None:
    """Check this machine: release, Python, torch and its GPU, a real product, a real 4-bit kernel, memory.

    Every line that is not ok says the next step.  Exit code 1 if anything failed; warnings do not count.
    Runs on any Linux machine; what only a Jetson has is checked only there.

    Examples:

      flowspec doctor

      flowspec doctor --storage /data --json
    """
    import json
    from dataclasses import asdict

    from rich.console import Console

    from flowspec_edge.fleet.board import read_board
    from flowspec_edge.fleet.checkup import check_system
    from flowspec_edge.fleet.checkup_compute import check_compute

    findings = check_system(storage=storage)
    with Console(stderr=True).status("trying torch and its kernels"):
        findings += check_compute(jetson=bool(read_board().l4t))
    failed = any(finding.state == "failed" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings)
    if failed:
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for finding in findings:
        advice = f"\n[bold]→[/bold] {escape(finding.advice)}" if finding.advice else ""
        table.add_row(finding.check, _MARKS[finding.state], escape(finding.found) + advice)
    Console(highlight=False).print(table)
