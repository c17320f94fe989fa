"""``flowspec doctor``: whether these machines can be boards of a cluster, and whether this GPU computes correctly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowspec_edge.cli.common.streams import saved
from flowspec_edge.errors import FlowspecError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from flowspec_edge.boards.doctor.cluster import BoardFindings
    from flowspec_edge.boards.doctor.gpu_report import GpuReport
    from flowspec_edge.boards.probe.findings import Finding

_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[red]failed[/red]",
          "unknown": "[dim]unknown[/dim]", "skipped": "[dim]skipped[/dim]"}


def doctor(
    cluster: Annotated[Path | None, typer.Option(
        "--cluster", help="Check the boards of this cluster.toml over ssh, and the links between them.  "
                          "This works before the first deploy up.  Default: check this machine.", metavar="FILE",
        show_default=False)] = None,
    storage: Annotated[str | None, typer.Option(
        "--storage", help="Where releases and shards will be stored.  Default: the home directory; with "
                          "--cluster the directory that deploy up uses.",
        metavar="DIR", show_default=False)] = None,
    fix: Annotated[bool, typer.Option(
        "--fix", help="Apply the harmless fixes: enable NTP, set the power mode of the cluster file, add "
                      "users to the GPU's groups.  Needs root, or sudo without a password.",
    )] = False,
    gpu: Annotated[bool, typer.Option(
        "--gpu", help="Test this machine's GPU instead: every kernel against float64, and the demonstration "
                      "model's tokens against the CPU's.")] = False,
    device: Annotated[str | None, typer.Option(
        "--device", help="With --gpu: cuda, cuda:1, or cpu to see the report without a GPU.  Default: cuda.",
        metavar="DEVICE", show_default=False)] = None,
    report: Annotated[Path | None, typer.Option(
        "--report", help="With --gpu: also write a file to send to the project: findings, versions, a "
                         "profile, the end of the services' journal without keys and addresses.",
        metavar="FILE.json",
        show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not a table.")] = False,
) -> None:
    """Check a machine: release, Python, torch and its GPU, a real product, a real 4-bit kernel, memory.

    Every line that is not ok says the next step.  Exit code 1 if a check failed; warnings do not count.
    Runs on any Linux machine; checks for Jetsons run on Jetsons only.

    Examples:

      flowspec doctor
      flowspec doctor --storage /data --json
      flowspec doctor --cluster cluster.toml
      flowspec doctor --cluster cluster.toml --fix
      flowspec doctor --gpu
      flowspec doctor --gpu --report board.json
    """
    if gpu:
        if cluster or storage or fix:
            raise UsageError("--gpu tests this machine's GPU and nothing else: leave out --cluster, "
                             "--storage and --fix; for a cluster run flowspec doctor --gpu on each board")
        _check_gpu("cuda" if device is None else device, as_json, report)
        return
    for option, value in (("--device", device), ("--report", report)):
        if value is not None:
            raise UsageError(f"{option} works with --gpu only: add --gpu, or leave out {option}")
    from flowspec_edge.boards.inventory import load_inventory
    from flowspec_edge.cli.common.progress import asking_boards

    inventory = load_inventory(cluster) if cluster else None
    from flowspec_edge.boards.doctor.cluster import BoardFindings, check_cluster
    from flowspec_edge.boards.doctor.run import check_machine

    with asking_boards("trying torch and its kernels") as show:
        if inventory is None:
            findings = check_machine(Path(storage) if storage else None, fix)
            boards = [BoardFindings("this machine", findings)]
        else:
            boards = check_cluster(inventory, storage,
                                 lambda name: show(f"{name} is done"), cluster, fix)
    failed = any(finding.state == "failed" for board in boards for finding in board.findings)
    if as_json:
        reports = [{"name": board.name, "findings": [finding.as_json() for finding in board.findings]}
                   for board in boards]
        print(json.dumps({"ok": not failed, "boards": reports}, indent=2))
    else:
        _show(boards)
    if failed:
        raise typer.Exit(1)


def _show(boards: list[BoardFindings]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    if len(boards) > 1:
        console.print(escape(_summary(boards)), soft_wrap=True)
    for board in boards:
        console.print(_table(f"[bold]{escape(board.name)}[/bold]", [("", finding) for finding in board.findings]))


def _summary(boards: list[BoardFindings]) -> str:
    """Return which boards are ready, in a line; the tables say why the others are not."""
    failed = {board.name: [finding.check for finding in board.findings if finding.state == "failed"]
              if board.reached else ["not reached"] for board in boards}
    bad = ", ".join(f"{name} ({', '.join(checks)})" for name, checks in failed.items() if checks)
    good = sum(not checks for checks in failed.values())
    return f"{good} of {len(boards)} boards have what flowspec needs" + (f"; failed: {bad}" if bad else "")


def _table(title: str, findings: Iterable[tuple[str, Finding]], computed: bool = False) -> Table:
    """Make a table with a line for each finding, and its next step below it.

    title     in rich's markup
    findings  each with the name of its group, which the first of a group shows
    computed  whether to show groups, and the errors of computations
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=computed, title_justify="left",
                  title=title)
    for heading in ("", "check", "", "error", "") if computed else ("check", "", ""):
        table.add_column(heading, no_wrap=computed and heading == "check")
    before = ""
    for group, finding in findings:
        advice = f"\n[bold]→[/bold] {escape(finding.advice)}" if finding.advice else ""
        mark = "[green]fixed[/green]" if finding.fixed else _MARKS[finding.state]
        error = "" if finding.error is None else f"{finding.error:.0e}" if finding.error else "0"
        cells = [escape(finding.check), mark, *[error] * computed, escape(finding.found) + advice]
        table.add_row(*["" if group == before else group] * computed, *cells)
        before = group
    return table


def _check_gpu(device: str, as_json: bool, out: Path | None) -> None:
    from flowspec_edge.util.files import check_writable

    if out is not None:
        check_writable(out)
    from flowspec_edge.boards.doctor.board_report import PARTS
    from flowspec_edge.boards.doctor.gpu_report import GROUPS, check_gpu
    from flowspec_edge.cli.common.progress import progress
    from flowspec_edge.lab.token_check import token_checks
    from flowspec_edge.model.opened import DEMO, resolve_model

    with progress(len(GROUPS) + (0 if out is None else PARTS), device, "parts") as doing:
        try:
            report = check_gpu(token_checks(resolve_model(DEMO)), device, doing)
        except FlowspecError as error:  # a torch that sees no GPU is worth a report, too
            if out is not None:
                _write_report(out, {"error": str(error)}, device, doing)
            raise
        if out is not None:
            _write_report(out, report.as_json(), device, doing)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _show_gpu(report)
    if not report.ok:
        raise typer.Exit(1)


def _write_report(out: Path, gpu: dict[str, Any], device: str, doing: Callable[[str], None]) -> None:
    import sys
    from datetime import date

    from flowspec_edge.boards.doctor.board_report import board_report
    from flowspec_edge.util.files import write_output

    report = board_report(gpu, device, str(date.today()), report=doing)
    if saved(out, partial(write_output, out, json.dumps(report, indent=2) + "\n")):
        print(f"Written to {out}: look through it before you send it", file=sys.stderr)


def _show_gpu(report: GpuReport) -> None:
    import torch
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    cuda_text = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    capability = f", compute capability {'.'.join(map(str, report.capability))}" if report.capability else ""
    rows = [(group, check) for group, checks in report.checks.items() for check in checks]
    console.print(_table(f"[bold]{escape(report.name)}[/bold]{capability}; torch {torch.__version__}{cuda_text}", rows,
                         computed=True))
    console.print(
        f"\n{report.failed} of {len(rows)} checks failed on {report.device}: models would be computed wrongly, "
        "or not at all." if report.failed else f"\nAll checks passed on {report.device}.")
