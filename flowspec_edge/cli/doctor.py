"""``flowspec doctor``: are these machines fit to be boards of a cluster?

Knows how findings are shown.  Does not know what is checked (``fleet.checkup``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from flowspec_edge.fleet.checkup_fleet import Checked

_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[red]failed[/red]",
          "unknown": "[dim]unknown[/dim]"}


def doctor(
    cluster: Annotated[Path | None, typer.Option(
        "--cluster", help="Check the boards of this cluster.toml, over ssh, and the links between them; by "
                          "default this machine.", metavar="FILE", show_default=False)] = None,
    storage: Annotated[str | None, typer.Option(
        "--storage", help="Where releases and shards are to lie; by default the home directory.",
        metavar="DIR", show_default=False)] = None,
    fix: Annotated[bool, typer.Option(
        "--fix", help="Put right what does no harm: switch NTP on, the power mode that the cluster file asks "
                      "for, the groups of whoever uses the GPU.  As root, or by sudo without a password.",
    )] = False,
    gpu: Annotated[bool, typer.Option(
        "--gpu", help="Instead: does this machine's GPU compute right?  Kernel by kernel against float64, "
                      "and the demonstration model's tokens against the CPU's.")] = False,
    device: Annotated[str | None, typer.Option(
        "--device", help="With --gpu: cuda, cuda:1, or cpu to try the report where there is no GPU; by "
                         "default cuda.", metavar="DEVICE", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not a table.")] = False,
) -> None:
    """Check a machine: release, Python, torch and its GPU, a real product, a real 4-bit kernel, memory.

    Every line that is not ok says the next step.  Exit code 1 if anything failed; warnings do not count.
    Runs on any Linux machine; what only a Jetson has is checked only there.

    Examples:

      flowspec doctor

      flowspec doctor --storage /data --json

      flowspec doctor --cluster cluster.toml

      flowspec doctor --cluster cluster.toml --fix

      flowspec doctor --gpu
    """
    if gpu:
        if cluster or storage or fix:
            raise UsageError("--gpu tests this machine's GPU and nothing else: leave out --cluster, "
                             "--storage and --fix; for a cluster run flowspec doctor --gpu on each board")
        from flowspec_edge.cli.doctor_gpu import doctor_gpu

        doctor_gpu("cuda" if device is None else device, as_json)
        return
    if device is not None:
        raise UsageError("--device goes with --gpu, which is not there: add it, or leave out --device")
    import json

    from rich.console import Console

    from flowspec_edge.fleet.checkup_fleet import Checked, check_fleet
    from flowspec_edge.fleet.checkup_run import check_machine

    with Console(stderr=True).status("trying torch and its kernels") as status:
        if cluster is None:
            boards = [Checked("this machine", check_machine(Path(storage) if storage else None, fix=fix))]
        else:
            from flowspec_edge.fleet.inventory import load_inventory

            boards = check_fleet(load_inventory(cluster), storage,
                                 lambda name: status.update(f"{name} is done"), cluster, fix)
    failed = any(finding.state == "failed" for board in boards for finding in board.findings)
    if as_json:
        told = [{"name": board.name, "findings": [finding.as_json() for finding in board.findings]}
                for board in boards]
        print(json.dumps({"ok": not failed, "boards": told}, indent=2))
    else:
        _show(boards)
    if failed:
        raise typer.Exit(1)


def _show(boards: list[Checked]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for board in boards:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False, title_justify="left",
                      title=f"[bold]{escape(board.name)}[/bold]")
        for finding in board.findings:
            advice = f"\n[bold]→[/bold] {escape(finding.advice)}" if finding.advice else ""
            mark = "[green]fixed[/green]" if finding.fixed else _MARKS[finding.state]
            table.add_row(finding.check, mark, escape(finding.found) + advice)
        console.print(table)
