"""``flowspec device``: profile a board, answer a link test, show a profile, compare kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from flowspec_edge.cli.common.options import (
    MOST_SECONDS,
    ModelOption,
    ShardedDtype,
    ThreadsOption,
    not_nan,
    parse_counts,
)
from flowspec_edge.cli.common.progress import done_of, plain_lines
from flowspec_edge.cli.common.streams import saved
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.draft_kinds import EAGLE2
from flowspec_edge.model.opened import DEMO
from flowspec_edge.util.terminal import plain, printable

if TYPE_CHECKING:
    from flowspec_edge.boards.measurement.kernels import KernelReport
    from flowspec_edge.device_profile import Profile

Device = Literal["auto", "cpu", "cuda"]

PEER_PORT = 7779
_CONTEXT = 1000  # cached tokens, in a profile's table
_PHASES = {"link": 0.02, "memory": 0.03, "loopback": 0.1, "stages": 0.55, "draft device": 0.3}  # of the time

app = typer.Typer(help="A board: measure it, show its profile.", no_args_is_help=True)


@app.command()
def profile(
    out: Annotated[Path | None, typer.Option(
        "--out", help="Write the profile to this file, which names it.  Default: no file.",
        metavar="NAME.toml")] = None,
    model: ModelOption = DEMO,
    peer: Annotated[str | None, typer.Option(
        "--peer", help="Measure the link to a device that runs `flowspec device peer`.  Default: loopback.",
        metavar="HOST:PORT")] = None,
    cluster: Annotated[Path | None, typer.Option(
        "--cluster", help="Measure all boards of this cluster.toml over ssh, write a profile of each to "
                          "profiles/ beside it, and name them in it.  Boards that have been measured are "
                          "skipped.", metavar="FILE", show_default=False)] = None,
    device: Annotated[Device, typer.Option(
        "--device", help="auto: the GPU if PyTorch sees one, else the CPU; with --cluster the torch_device "
                         "of each board.")] = "auto",
    dtype: Annotated[ShardedDtype | None, typer.Option(
        "--dtype", help="Element type of weights and caches.  [default: fp32 on a CPU, fp16 on a GPU]",
        show_default=False)] = None,
    threads: ThreadsOption = 0,
    quick: Annotated[bool, typer.Option(
        "--quick", help="Measure for 20 seconds instead of one or two minutes.")] = False,
    force: Annotated[bool, typer.Option(
        "--force", help="Overwrite an existing file; with --cluster, measure all boards again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON, not a table.")] = False,
) -> None:
    """Measure this machine, for virtual time, emulation and the planner.

    Measured are stage times over rows and cached tokens, draft passes, lm_head, memory, the link, and on a
    GPU the price of a launch.  Stop other work first, and set the board's final power mode.

    With --cluster every board runs this command by the release that flowspec deploy up has put there; stop
    the services with flowspec deploy stop.  A board that fails does not stop the others, and the same command
    goes on after an interruption.

    Examples:

      flowspec device profile --out profiles/my-board.toml
      flowspec device profile --model llama-2-7b --device cuda --peer 10.0.0.2:7779 --out orin-1.toml
      flowspec device profile --cluster cluster.toml
    """
    if cluster is not None:
        for option, value in (("--out", out), ("--peer", peer)):
            if value is not None:
                raise UsageError(f"{option} is for one board: with --cluster, profiles go to profiles/ "
                                 "beside the cluster file, and links to the next board are measured")
        _measure_cluster(cluster, [
            *(["--model", model] if model != DEMO else []), *(["--dtype", dtype] if dtype else []),
            *(["--device", device] if device != "auto" else []),
            *(["--threads", str(threads)] if threads else []), *(["--quick"] if quick else [])],
            force, as_json)
        return
    from datetime import date

    from flowspec_edge.model.opened import resolve_model
    from flowspec_edge.util.files import check_writable, write_output

    if out is not None:
        if out.suffix != ".toml":
            raise UsageError(f"{out}: a profile's file ends in .toml")
        if out.exists() and not force:
            raise UsageError(f"{out} exists already; give another name, or replace it with --force")
        check_writable(out)
    open_model = resolve_model(model)
    address = parse_peer(peer) if peer else None

    from flowspec_edge.boards.measurement.profile import QUICK, Effort, ProfileOptions, measure_profile
    from flowspec_edge.device_profile import render

    on = _torch_device(device)
    profile_dtype: ShardedDtype = dtype or ("fp32" if on == "cpu" else "fp16")
    wish = ProfileOptions(out.stem if out else open_model.name, open_model, profile_dtype, on, threads, address,
                          str(date.today()))
    with _bar() as report:
        measured = measure_profile(wish, QUICK if quick else Effort(), report)
    is_written = out is not None and saved(out, partial(write_output, out, render(measured.profile)))
    if as_json:
        print(measured.profile.model_dump_json(indent=2))
        return
    _show(measured.profile)
    worst = max(map(abs, measured.relative_errors))
    middle = sorted(map(abs, measured.relative_errors))[len(measured.relative_errors) // 2]
    print(f"\nThe stage's curve is off by {middle:.0%} in the middle of the cases measured, "
          f"by {worst:.0%} in the worst.")
    if is_written:
        print(f"Written to {out}; use it with --profile {out}")


def _torch_device(requested: Device) -> Literal["cpu", "cuda"]:
    if requested != "auto":
        return requested
    from flowspec_edge.util.torchdevice import architectures, gpus, pick

    picked, reason = pick(requested, gpus(), architectures(), 0)
    if reason:
        print(f"flowspec: note: on the CPU: {reason}", file=sys.stderr)
    return "cpu" if picked == "cpu" else "cuda"


def _measure_cluster(path: Path, arguments: Sequence[str], again: bool, as_json: bool) -> None:
    from flowspec_edge.boards.inventory import load_inventory

    inventory = load_inventory(path)
    from flowspec_edge.boards.measurement.cluster import measure_boards
    from flowspec_edge.util.files import check_writable

    check_writable(path)
    outcomes = measure_boards(inventory, path, arguments, again, lambda board, message: print(
        f"{board}: {printable(message)}", file=sys.stderr, flush=True))
    failed = [outcome for outcome in outcomes if outcome.file is None]
    if as_json:
        print(json.dumps([{"name": outcome.board, "profile": str(outcome.file) if outcome.file else None,
                           "measured": outcome.measured, "why": outcome.why} for outcome in outcomes], indent=2))
    elif not failed:
        print(f"All {len(outcomes)} boards have measured profiles, which {path} names; next: flowspec plan "
              f"--devices {path}")
    if failed:
        names = ", ".join(outcome.board for outcome in failed)
        raise FlowspecError(f"{len(failed)} of {len(outcomes)} boards are not measured: {names} (see above); "
                            "mend that, and run the same command again: it skips those that are")


@app.command("peer")
def peer_command(
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, help="0: any free port.")] = PEER_PORT,
    seconds: Annotated[float | None, typer.Option(
        "--for", min=0.1, max=MOST_SECONDS, callback=not_nan,
        help="Seconds after which to stop.  Default: never.", metavar="SECONDS", show_default=False)] = None,
) -> None:
    """Answer another device's link test, until interrupted.

    Any client of the port can make this device receive and discard data, nothing else.

    Examples:

      flowspec device peer --for 600
    """
    from flowspec_edge.boards.links.linktest import serve_link

    def ready(bound_port: int) -> None:
        print(f"listening on {host}:{bound_port}; on the other device run: "
              f"flowspec device profile --peer THIS-HOST:{bound_port}", file=sys.stderr, flush=True)

    serve_link(host, port, seconds, ready=ready)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A profile's name, or a TOML file.", metavar="NAME")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show a profile: its times, and the source of its figures.

    Examples:

      flowspec device show orin-nano-8gb
    """
    from flowspec_edge.device_profile import load_profile

    profile = load_profile(name)
    if as_json:
        print(profile.model_dump_json(indent=2))
    else:
        _show(profile)


@app.command()
def kernels(
    device: Annotated[Device, typer.Option(
        "--device", help="auto: the GPU if PyTorch sees one, else the CPU.")] = "auto",
    rows: Annotated[str, typer.Option(
        "--rows", help="Rows of activations; a full segment has 16.", metavar="N,N,…")] = "1,4,16,32",
    shape: Annotated[str, typer.Option(
        "--shape", help="Outputs and inputs of the matrix.", metavar="NxK")] = "4096x4096",
    dtype: Annotated[ShardedDtype, typer.Option(
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
    from flowspec_edge.util.files import check_writable, write_output

    counts = parse_counts(rows, "--rows")
    sides = parse_counts(shape, "--shape", "x")
    if len(sides) != 2:
        raise UsageError(f"--shape {shape!r}: give outputs and inputs, such as 4096x4096")
    if out is not None:
        check_writable(out)

    import torch

    from flowspec_edge.boards.measurement.kernels import measure_kernels

    if threads:
        torch.set_num_threads(threads)
    report = measure_kernels(_torch_device(device), (sides[0], sides[1]), counts, dtype)
    text = json.dumps(report.as_json(), indent=2) + "\n"
    is_written = out is not None and saved(out, partial(write_output, out, text))
    if as_json:
        print(text, end="")
        return
    _show_kernels(report)
    if is_written:
        print(f"Written to {out}")


def parse_peer(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if ":" in host:
        raise UsageError(f"--peer {text!r}: links are measured over IPv4: give an IPv4 address or a host "
                         f"name, and the port, such as 10.0.0.2:{PEER_PORT}")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"--peer {text!r}: give HOST:PORT, such as 10.0.0.2:{PEER_PORT}")
    return host, int(port)


def _show(profile: Profile) -> None:
    console = Console()
    console.print(f"[bold]{plain(profile.name)}[/bold]  {profile.kind}, {profile.provenance}",
                  highlight=False)
    console.print(profile.summary, markup=False, highlight=False)
    console.print()
    console.print(_curve(profile))
    console.print()
    console.print(_facts(profile))
    console.print()
    console.print(profile.source.strip(), markup=False, highlight=False)


def _curve(profile: Profile) -> Table:
    curve = profile.stage
    table = Table(title=f"A segment through {curve.layers:g} layer{'s' if curve.layers != 1 else ''}",
                  title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("rows", "ms", f"ms over {_CONTEXT} cached tokens"):
        table.add_column(name, justify="right")
    for rows in curve.rows:
        milliseconds = [profile.stage_seconds(max(1, round(rows)), curve.layers, context) * 1e3
                        for context in (0, _CONTEXT)]
        table.add_row(f"{rows:g}", *(f"{ms:.4g}" for ms in milliseconds))
    return table


def _facts(profile: Profile) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value in _rows(profile):
        table.add_row(name, plain(value))
    return table


def _rows(profile: Profile) -> list[tuple[str, str]]:
    from flowspec_edge.device_profile import OUTPUT_LAUNCHES, SEGMENT_LAUNCHES, pass_titles

    p = profile
    lines = [
        ("model", f"{p.model.layers} layers, width {p.model.hidden_width}, {p.model.bytes_per_value} bytes a "
                  "value" + (f", {p.model.layer_mb:g} MB a layer" if p.model.layer_mb else "")),
        ("in every segment", f"{p.stage.overhead_ms:g} ms, whatever the layers"),
        ("draft pass", ", ".join(f"{title} {getattr(p.draft, name):g} ms" for name, title in pass_titles().items()
                                 if hasattr(p.draft, name))
                       + _more(p.draft.row_ms, "node")),
        ("lm_head", f"{p.lm_head.ms:g} ms" + _more(p.lm_head.row_ms, "row")),
        ("D0's bookkeeping", f"{p.host.bookkeeping_ms:g} ms an output"),
        ("link", f"{p.link.mbps:g} Mbps, {p.link.latency_ms:g} ms"),
    ]
    if p.launch:
        lines.append(("launches", f"{p.launch.us:g} µs each: {p.launch.layer} a layer and {SEGMENT_LAUNCHES} "
                                  f"a segment, in the times above; {sum(p.launch.per_pass(EAGLE2.name))} a draft "
                                  f"pass and {OUTPUT_LAUNCHES} an output, beside their times"))
    if p.collective.step_ms:
        lines.append(("collectives", f"{p.collective.step_ms:g} ms a step of a ring, beside its bytes"))
    if p.memory:
        rate = f"; read at {p.memory.gb_per_s:g} GB/s" if p.memory.gb_per_s else ""
        lines.append(("memory", f"{p.memory.usable_mb:.0f} of {p.memory.total_mb:.0f} MB usable, "
                                f"{p.memory.process_mb:.0f} MB a process{rate}"))
    if p.conditions:
        c = p.conditions
        clocks = ", ".join(f"{name} {mhz:g} MHz" for name, mhz in c.clocks_mhz.items())
        lines += [(name, value) for name, value in (
            ("measured", c.date), ("machine", c.machine), ("with", ", ".join(filter(None, (
                c.model, c.dtype, c.device, f"{c.threads} threads" if c.threads else "")))),
            ("power mode", c.power_mode), ("clocks", clocks),
            ("temperature", "" if c.temperature_c is None else f"{c.temperature_c:g} °C"),
            ("link measured with", c.peer)) if value]
    return lines


def _more(ms: float, unit: str) -> str:
    return f"; {ms:g} ms more for each {unit}" if ms else ""


def _show_kernels(report: KernelReport) -> None:
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
    for kind, result in report.kinds.items():
        cells = [f"{result.ms[rows]:.3g}" if result.ms else "-" for rows in report.rows]
        cells.append("-" if result.check.error is None else f"{result.check.error:.0e}")
        if on_gpu:
            share = report.share(kind, report.rows[0])
            cells.append("-" if share is None else f"{share:.0%}")
        table.add_row(kind, *cells)
    console.print(table)
    for kind, result in report.kinds.items():
        if not result.check.ok:
            console.print(f"{kind} does not work: {result.check.found}", markup=False, highlight=False)
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
    others = {kind: result.ms[at] for kind, result in report.kinds.items()
              if kind in ("int4", "nf4", "fp4") and kind != fastest and result.ms}
    if not others:
        return ""
    second = min(others, key=lambda kind: others[kind])
    return f", {others[second] / report.kinds[fastest].ms[at]:.1f} times as fast as {second}"


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar over the phases of a measurement, if stderr is a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description:13}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal)
    bar.add_task("", total=1.0)
    [task] = bar.tasks

    def report(phase: str, share: float) -> None:
        names = list(_PHASES)
        before = sum(_PHASES[name] for name in names[:names.index(phase)])
        bar.update(task.id, description=phase, completed=before + share * _PHASES[phase])

    def line(seconds: float) -> str:
        return f"profile: {task.description}, {done_of(100 * task.completed, 100, seconds, '%')}"

    with bar, plain_lines(line):
        yield report
