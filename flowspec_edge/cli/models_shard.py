"""``flowspec models shard``, ``inspect`` and ``verify``: models cut into parts for devices.

Knows options, progress bars and tables.  What is written is decided in ``flowspec_edge.sharding``; a
sharded model is looked at through its manifest alone, without torch.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.manifest import DRAFT, ComputeDtype, Manifest, QuantKind, ShardDtype

if TYPE_CHECKING:
    from flowspec_edge.sharding.plan import Plan

_FOUR_BIT = "4bit"


class StoredDtype(str, Enum):
    """How weights are stored, as the command line names it."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT4 = "int4"
    NF4 = "nf4"
    FP4 = "fp4"
    FOUR_BIT = _FOUR_BIT


class ComputeName(str, Enum):
    """What devices compute in."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


_Directory = Annotated[Path, typer.Argument(
    help="The sharded model, or a board's part of it.", metavar="DIR")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def shard(
    model: Annotated[str, typer.Option(
        "--model", help="A checkpoint's directory, flowspec's own, or OWNER/NAME on the Hugging Face hub.",
        metavar="DIR|HUB_ID")],
    out: Annotated[Path, typer.Option("--out", help="Where the parts go.", metavar="DIR")],
    stages: Annotated[int | None, typer.Option(
        "--stages", help="Cut evenly into so many stages.", metavar="N")] = None,
    split: Annotated[str | None, typer.Option(
        "--split", help="Layers of each stage, such as 8,8,8,8.", metavar="N,N,…")] = None,
    dtype: Annotated[StoredDtype | None, typer.Option(
        "--dtype", help="How weights are stored; 4bit takes the 4-bit kind that runs faster (--kernels).  "
        "Default: the checkpoint's own 16 bits.")] = None,
    group: Annotated[int | None, typer.Option(
        "--group", help="Weights that share a scale in int4.  Default: 128.", metavar="N")] = None,
    compute_dtype: Annotated[ComputeName | None, typer.Option(
        "--compute-dtype",
        help="What devices compute in.  Default: bf16 with 4 bits, else as stored.")] = None,
    kernels: Annotated[Path | None, typer.Option(
        "--kernels", help="For 4bit: what `flowspec device kernels --out` wrote on a board.  Default: this "
        "machine is measured.", metavar="FILE")] = None,
    draft: Annotated[list[Path] | None, typer.Option(
        "--draft", help="A draft model to put beside: an EAGLE head, a small model, SPD's module; its kind "
        "is recognised.  May be repeated.  Those in flowspec's own directory go along anyway.",
        metavar="DIR")] = None,
) -> None:
    """Cut a model into one part a device: stage-1 … stage-N, draft, and a manifest with every file's sha256.

    A few MB of the model are in memory at a time, whatever its size.  Interrupted, the same command goes
    on where it was.  4-bit weights are quantised here: a board never sees the full matrices.

    Examples:

      flowspec models shard --model ./Llama-2-13b-chat --draft ./EAGLE-13B --stages 4 --dtype int4 --out 13b

      flowspec models shard --model demo --split 2,3,3 --out demo-3
    """
    lengths = _lengths(split)
    if kernels is not None and dtype != StoredDtype.FOUR_BIT:
        raise UsageError("--kernels goes with --dtype 4bit")
    stored = _stored_dtype(dtype, kernels)

    from flowspec_edge.sharding.job import finished, run, total_size
    from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
    from flowspec_edge.sharding.source import open_source

    source = open_source(model, draft or [])
    ranges = ranges_for(source.layers, stages, lengths)
    compute: ComputeDtype | None = compute_dtype.value if compute_dtype else None
    plan = make_plan(source, recipe_for(source, stored, group, compute), ranges)
    if finished(plan, out) is not None:
        print(f"{out} is finished already; look at it with: flowspec models inspect {out}")
        return
    try:
        with _interrupts_between_writes() as check, _bar("sharding", total_size(plan)) as progress:
            def written(count: int) -> None:
                progress(count)
                check()

            run(plan, out, written)
    except KeyboardInterrupt:
        typer.echo(f"flowspec: interrupted; the same command goes on in {out}", err=True)
        raise
    print(f"{out}: {_summary(plan)}; look at it with: flowspec models inspect {out}")


def inspect(
    directory: _Directory,
    context: Annotated[int, typer.Option(
        "--context", help="Rows of text that the caches hold.", metavar="N", min=1)] = 4096,
    as_json: _Json = False,
) -> None:
    """Print what each part of a sharded model holds and what it takes in memory.

    Memory is weights in the compute dtype and keys and values at --context rows; D0 with every draft model
    loaded.  Activations and the interpreter come on top.

    Example:

      flowspec models inspect llama-13b --context 2048
    """
    manifest = Manifest.read(directory)
    rows = _figures(manifest, context)
    if as_json:
        print(json.dumps({"source": manifest.source.model_dump(), "dtype": manifest.dtype,
                          "compute_dtype": manifest.compute_dtype, "model_type": manifest.model_type,
                          "quantisation": manifest.quantisation and manifest.quantisation.model_dump(),
                          "layers": manifest.layers, "context": context, "parts": rows}, indent=2))
        return
    _print_table(manifest, rows, context)


def verify(directory: _Directory, as_json: _Json = False) -> None:
    """Check every file of a sharded model against its manifest.

    On a board only its own part need be there; the others are named.  Exits with 1 if a file is missing,
    altered or not in the manifest.

    Example:

      flowspec models verify llama-13b
    """
    manifest = Manifest.read(directory)
    here = [name for name in manifest.parts if manifest.is_here(name)]
    absent = [name for name in manifest.parts if name not in here]
    if not here:
        raise FlowspecError(f"{directory} has none of the parts {', '.join(manifest.parts)}: copy one beside "
                            "manifest.json")
    wrong: dict[str, str] = {}
    with _bar("verifying", sum(manifest.part(name).size for name in here)) as progress:
        for name in here:
            try:
                manifest.check(name, progress)
            except FlowspecError as error:
                wrong[name] = str(error)
    if as_json:
        print(json.dumps({"sound": [n for n in here if n not in wrong], "wrong": wrong, "absent": absent},
                         indent=2))
    else:
        for name in here:
            print(f"{name}: {wrong.get(name) or f'{len(manifest.part(name).files)} files are as written'}")
        for name in absent:
            print(f"{name}: not here")
    if wrong:
        first = next(iter(wrong.values()))
        raise FlowspecError(first if len(wrong) == 1 else f"{len(wrong)} parts are wrong, the first: {first}")


def _lengths(split: str | None) -> list[int] | None:
    if split is None:
        return None
    try:
        return [int(length) for length in split.split(",")]
    except ValueError:
        raise UsageError(f"--split {split}: give numbers of layers with commas, such as 8,8,8,8") from None


def _stored_dtype(dtype: StoredDtype | None, kernels: Path | None) -> ShardDtype | None:
    if dtype is None:
        return None
    if dtype != StoredDtype.FOUR_BIT:
        return cast(ShardDtype, dtype.value)
    if kernels is None:
        return _fastest_here()
    try:
        fastest = json.loads(kernels.read_text(encoding="utf-8"))["fastest"]
    except OSError as error:
        raise UsageError(f"cannot read {kernels}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{kernels} is not what `flowspec device kernels --out` writes: it has no key "
                         "\"fastest\"") from error
    if fastest is None:
        raise UsageError(f"{kernels} says that no 4-bit kind works on that device: use --dtype fp16 or bf16")
    if fastest not in get_args(QuantKind):
        raise UsageError(f"{kernels} says that {fastest!r} is the fastest: no 4-bit kind")
    return cast(QuantKind, fastest)


def _fastest_here() -> QuantKind:
    """The 4-bit kind that multiplies fastest on this machine, which takes some seconds to find out."""
    import torch

    from flowspec_edge.fleet.kernels import measure_kernels

    report = measure_kernels("cuda" if torch.cuda.is_available() else "cpu")
    if report.fastest is None:
        raise UsageError("no 4-bit kind works on this machine: give what `flowspec device kernels --out` "
                         "wrote on a board, as --kernels FILE, or name a kind")
    print(f"the fastest 4-bit kind on {report.name}: {report.fastest}")
    return report.fastest


def _summary(plan: Plan) -> str:
    recipe = plan.recipe
    how: str = recipe.dtype
    if recipe.kind == "int4":
        how += f" in groups of {recipe.group}"
    if plan.kept:
        how += f" ({len(plan.kept)} matrices in 16 bit: no group divides them)"
    drafts = ", ".join(draft.kind for draft in plan.source.drafts) or "no draft model"
    return f"{len(plan.ranges)} stages, {how}, {drafts}"


def _figures(manifest: Manifest, context: int) -> list[dict[str, Any]]:
    """One row a part, D0's last."""
    found = []
    for name, part in manifest.parts.items():
        layers = None if name == DRAFT else manifest.ranges[int(name.rpartition("-")[2]) - 1]
        found.append({
            "part": name, "layers": layers, "parameters": part.parameters, "disk_bytes": part.size,
            "weight_bytes": part.weight_bytes, "cache_bytes": part.row_bytes * context,
            "memory_bytes": part.weight_bytes + part.row_bytes * context, "here": manifest.is_here(name),
        })
    return found


def _print_table(manifest: Manifest, rows: list[dict[str, Any]], context: int) -> None:
    from rich.console import Console
    from rich.table import Table

    how = manifest.quantisation
    kind = f"{how.kind} in groups of {how.group}" if how else manifest.dtype
    table = Table(title=f"{manifest.source.name}: {manifest.model_type}, {manifest.layers} layers of width "
                        f"{manifest.hidden_width}, {kind}, computing in {manifest.compute_dtype}; "
                        f"caches of {context} rows; sizes in MB", title_justify="left")
    table.add_column("part", no_wrap=True)
    for heading in ("layers", "parameters", "on disk", "weights", "cache", "in memory"):
        table.add_column(heading, justify="right")
    for row in rows:
        layers = f"{row['layers'][0]}–{row['layers'][1] - 1}" if row["layers"] else "–"
        sizes = [f"{row[f'{what}_bytes'] / 1e6:,.1f}" for what in ("disk", "weight", "cache", "memory")]
        table.add_row(row["part"] + ("" if row["here"] else " (not here)"), layers,
                      f"{row['parameters'] / 1e6:,.1f} M", *sizes)
    Console().print(table)
    if how and how.kept:
        print(f"{len(how.kept)} matrices stay in 16 bit, since no group divides them")


@contextmanager
def _interrupts_between_writes() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the yielded function is called, which raises it; a second one comes at once.

    Raised inside a library's own code it may come out as another exception, with a traceback.
    """
    asked = False

    def note(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of bytes on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
