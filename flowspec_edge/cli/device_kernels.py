"""``flowspec device kernels``: which kind of weights this device multiplies by fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowspec_edge.cli.options import Dtype
from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from flowspec_edge.fleet.kernels import KernelReport


def kernels(
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="What computes.")] = "cpu",
    rows: Annotated[str, typer.Option(
        "--rows", help="Rows of activations: of a segment, 16 by default.", metavar="N,N,…")] = "1,4,16,32",
    shape: Annotated[str, typer.Option(
        "--shape", help="Of the matrix: outputs and inputs.", metavar="NxK")] = "4096x4096",
    dtype: Annotated[Dtype, typer.Option(
        "--dtype", help="Of the activations that 4-bit weights are multiplied with.")] = "bf16",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Of torch; 0: its own choice.")] = 0,
    out: Annotated[Path | None, typer.Option(
        "--out", help="Write what was found here, as JSON.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print that JSON, no table.")] = False,
) -> None:
    """Try and time products with full weights, bitsandbytes' nf4 and fp4, and grouped int4.

    Every kind does a real product, which is compared with float64, in a process of its own: a library that
    was built for another GPU may end it.  What works is timed, all kinds in turn.  The fastest 4-bit kind
    at 16 rows is the one to shard models in for this device.

    Examples:

      flowspec device kernels

      flowspec device kernels --device cuda --dtype fp16 --out kernels.json

      flowspec device kernels --shape 11008x4096 --rows 16,64 --json
    """
    import json

    from flowspec_edge.bench.output import check_writable, write

    counts = _numbers("--rows", rows, ",")
    sides = _numbers("--shape", shape, "x")
    if len(sides) != 2:
        raise UsageError(f"--shape {shape!r}: give outputs and inputs, such as 4096x4096")
    if out is not None:
        check_writable(out)

    import torch

    from flowspec_edge.fleet.kernels import measure_kernels

    if threads:
        torch.set_num_threads(threads)
    report = measure_kernels(device, (sides[0], sides[1]), counts, dtype)
    text = json.dumps(report.as_json(), indent=2) + "\n"
    if out is not None:
        write(out, text)
    if as_json:
        print(text, end="")
        return
    _show(report)
    if out is not None:
        print(f"Written to {out}")


def _numbers(option: str, text: str, between: str) -> list[int]:
    """Positive numbers with ``between`` between them; UsageError for anything else."""
    parts = text.split(between)
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError(f"{option} {text!r}: give whole numbers from 1 on with {between!r} between them")
    return [int(part) for part in parts]


def _show(report: KernelReport) -> None:
    """A table of times, and the winner in words."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    outputs, inputs = report.shape
    console.print(f"A product with {outputs} x {inputs} weights on {report.name}", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("weights")
    for rows in report.rows:
        table.add_column(f"{rows} row{'s' if rows > 1 else ''}, ms", justify="right")
    table.add_column("error", justify="right")
    on_gpu = report.device == "cuda"
    if on_gpu:
        table.add_column(f"of a copy's bytes/s, {report.rows[0]}", justify="right")
    for kind, found in report.kinds.items():
        cells = [f"{found.ms[rows]:.3g}" if found.ms else "-" for rows in report.rows]
        cells.append("-" if found.trial.error is None else f"{found.trial.error:.0e}")
        if on_gpu:
            share = report.share(kind, report.rows[0])
            cells.append("-" if share is None else f"{share:.0%}")
        table.add_row(kind, *cells)
    console.print(table)
    for kind, found in report.kinds.items():
        if not found.trial.works:
            console.print(f"{kind} does not work: {found.trial.why}", markup=False, highlight=False)
    if report.unadvised:
        console.print(f"{' and '.join(report.unadvised)}: not for this GPU, on which bitsandbytes expands "
                      "the whole matrix for every product of more than 4 rows", highlight=False)
    if report.fastest is None:
        console.print("\nNo 4-bit kind is to be advised here: shard models in fp16.", highlight=False)
        return
    console.print(f"\nFastest in 4 bits at {report.judged_at} rows: {report.fastest}"
                  f"{_comparison(report)}; activations in {report.dtype}", highlight=False)


def _comparison(report: KernelReport) -> str:
    """How many times as fast as the next 4-bit kind."""
    at, fastest = report.judged_at, report.fastest
    assert fastest is not None
    others = {kind: found.ms[at] for kind, found in report.kinds.items()
              if kind in ("int4", "nf4", "fp4") and kind != fastest and found.ms}
    if not others:
        return ""
    second = min(others, key=lambda kind: others[kind])
    return f", {others[second] / report.kinds[fastest].ms[at]:.1f} times as fast as {second}"
