"""``flowspec device kernels``: which 4-bit kernel is the fastest on this device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowspec_edge.cli.common.options import Dtype, ThreadsOption, parse_counts
from flowspec_edge.errors import UsageError
from flowspec_edge.util.terminal import plain

if TYPE_CHECKING:
    from flowspec_edge.fleet.profiling.kernels import KernelReport


def kernels(
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="cpu or cuda.")] = "cpu",
    rows: Annotated[str, typer.Option(
        "--rows", help="Rows of activations; a segment has 16 by default.", metavar="N,N,…")] = "1,4,16,32",
    shape: Annotated[str, typer.Option(
        "--shape", help="Outputs and inputs of the matrix.", metavar="NxK")] = "4096x4096",
    dtype: Annotated[Dtype, typer.Option(
        "--dtype", help="Element type of activations for 4-bit weights.")] = "bf16",
    threads: ThreadsOption = 0,
    out: Annotated[Path | None, typer.Option(
        "--out", help="Write the results to this file, as JSON.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Test and time products with full weights, bitsandbytes' nf4 and fp4, and grouped int4.

    Every kernel computes a product that is compared with float64, in its own process: a library built for
    another GPU may crash.  Kernels that work are timed, in turn.  The fastest 4-bit kernel at 16 rows is the
    one for shards on this device.

    Examples:

      flowspec device kernels
      flowspec device kernels --device cuda --dtype fp16 --out kernels.json
      flowspec device kernels --shape 11008x4096 --rows 16,64 --json
    """
    import json

    from flowspec_edge.util.files import check_writable, write_output

    counts = parse_counts(rows, "--rows")
    sides = parse_counts(shape, "--shape", "x")
    if len(sides) != 2:
        raise UsageError(f"--shape {shape!r}: give outputs and inputs, such as 4096x4096")
    if out is not None:
        check_writable(out)

    import torch

    from flowspec_edge.fleet.profiling.kernels import measure_kernels

    if threads:
        torch.set_num_threads(threads)
    report = measure_kernels(device, (sides[0], sides[1]), counts, dtype)
    text = json.dumps(report.as_json(), indent=2) + "\n"
    if out is not None:
        write_output(out, text)
    if as_json:
        print(text, end="")
        return
    _show(report)
    if out is not None:
        print(f"Written to {out}")


def _show(report: KernelReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    outputs, inputs = report.shape
    console.print(f"A product with {outputs} x {inputs} weights on {plain(report.name)}", highlight=False)
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
        cells.append("-" if found.check.error is None else f"{found.check.error:.0e}")
        if on_gpu:
            share = report.share(kind, report.rows[0])
            cells.append("-" if share is None else f"{share:.0%}")
        table.add_row(kind, *cells)
    console.print(table)
    for kind, found in report.kinds.items():
        if not found.check.works:
            console.print(f"{kind} does not work: {found.check.why}", markup=False, highlight=False)
    if report.unadvised:
        console.print(f"{' and '.join(report.unadvised)}: not for this GPU, on which bitsandbytes expands "
                      "the whole matrix for every product of more than 4 rows", highlight=False)
    if report.fastest is None:
        console.print("\nNo 4-bit kind is to be advised here: shard models in fp16.", highlight=False)
        return
    console.print(f"\nFastest in 4 bits at {report.compared_rows} rows: {report.fastest}"
                  f"{_comparison(report)}; activations in {report.dtype}", highlight=False)


def _comparison(report: KernelReport) -> str:
    at, fastest = report.compared_rows, report.fastest
    assert fastest is not None
    others = {kind: found.ms[at] for kind, found in report.kinds.items()
              if kind in ("int4", "nf4", "fp4") and kind != fastest and found.ms}
    if not others:
        return ""
    second = min(others, key=lambda kind: others[kind])
    return f", {others[second] / report.kinds[fastest].ms[at]:.1f} times as fast as {second}"
