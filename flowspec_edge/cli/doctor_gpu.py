"""``flowspec doctor --gpu``: one report on whether a GPU computes right.

Knows how it is shown.  Does not know what is tried (``fleet.checkup_gpu``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flowspec_edge.fleet.checkup_gpu import GpuReport

_MARKS = {"ok": "[green]ok[/green]", "failed": "[red]failed[/red]", "skipped": "[dim]skipped[/dim]"}


def doctor_gpu(device: str, as_json: bool) -> None:
    """Try it and print the report; exit code 1 if anything failed, UsageError without such a device."""
    from rich.console import Console

    from flowspec_edge.fleet.checkup_gpu import check_gpu
    from flowspec_edge.modeldir import DEMO, resolve_model

    with Console(stderr=True).status(f"{device}: starting") as status:
        report = check_gpu(resolve_model(DEMO), device,
                           report=lambda doing: status.update(f"{device}: {doing}"))
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(1)


def _show(report: GpuReport) -> None:
    import torch
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    built = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    capability = f", compute capability {'.'.join(map(str, report.capability))}" if report.capability else ""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title_justify="left",
                  title=f"[bold]{escape(report.name)}[/bold]{capability}; torch {torch.__version__}{built}")
    for heading in ("", "check", "", "error", ""):
        table.add_column(heading, no_wrap=heading == "check")
    group = ""
    for check in report.checks:
        error = "" if check.error is None else f"{check.error:.0e}" if check.error else "0"
        table.add_row("" if check.group == group else check.group, check.name, _MARKS[check.state], error,
                      escape(check.found))
        group = check.group
    console.print(table)
    failed = sum(check.state == "failed" for check in report.checks)
    console.print(f"\n{failed} of {len(report.checks)} checks failed on {report.device}: models would be "
                  "computed wrongly, or not at all." if failed else f"\nAll is right on {report.device}.")
