"""``flowspec models shard``, ``inspect`` and ``verify``; the latter two need no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer

from flowspec_edge.cli.common.options import MOST_STAGES, MOST_TOKENS, ShardedDtype, parse_counts
from flowspec_edge.cli.common.progress import done_of, plain_lines
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.candidates import COUNT, LEAST_VOCABULARY
from flowspec_edge.model.opened import OpenModel, require_name
from flowspec_edge.util.bounded_read import read_json
from flowspec_edge.util.terminal import counted_stages, plain

if TYPE_CHECKING:
    from flowspec_edge.model.manifest import Manifest, QuantKind, ShardDtype
    from flowspec_edge.sharding.plan import ShardingPlan

StoredDtype = Literal["fp32", "fp16", "bf16", "int4", "nf4", "fp4", "4bit"]
HeadBits = Literal["16bit", "int8", "int4"]
CacheBits = Literal["16bit", "int8"]
_Directory = Annotated[Path, typer.Argument(
    help="A sharded model, or a board's part of it.", metavar="DIR")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def shard(
    model: Annotated[str, typer.Option(
        "--model", help="A checkpoint's directory, a GGUF file, a model of flowspec, or OWNER/NAME on Hugging Face's "
        "hub.",
        metavar="DIR|FILE|HUB_ID")],
    out: Annotated[Path, typer.Option("--out", help="The directory of the sharded model.", metavar="DIR")],
    stages: Annotated[int | None, typer.Option(
        "--stages", help="Number of stages, which share the layers evenly.", max=MOST_STAGES, metavar="N")] = None,
    split: Annotated[str | None, typer.Option(
        "--split", help="Layers of each stage, such as 8,8,8,8.", metavar="N,N,…")] = None,
    dtype: Annotated[StoredDtype | None, typer.Option(
        "--dtype", help="Element type of stored weights; 4bit: the fastest 4-bit kind (--kernels).  Default: "
        "the checkpoint's own 16 bits, or the 4 bits of a GGUF file.")] = None,
    group: Annotated[int | None, typer.Option(
        "--group", min=1, max=1 << 20, metavar="N",
        help="Weights per scale in int4.  Default: 128, or 32 for the 4 bits of a GGUF file.")] = None,
    compute_dtype: Annotated[ShardedDtype | None, typer.Option(
        "--compute-dtype",
        help="Element type of computing.  Default: bf16 with 4 bits, else as stored.")] = None,
    lm_head: Annotated[HeadBits | None, typer.Option(
        "--lm-head", help="Bits of lm_head.  With int8 or int4, draft heads have 4 bits.  Default: int8 "
        "with 4 bits, else 16bit.  What it costs: flowspec models loss.")] = None,
    kv_cache: Annotated[CacheBits, typer.Option(
        "--kv-cache", help="How stages keep keys and values.  16bit: as computed.  int8: in half of that memory.",
        )] = "16bit",
    candidates: Annotated[int | None, typer.Option(
        "--candidates", min=0, max=4096, metavar="N",
        help="Tokens of a draft row that lm_head's own rows score; a factor of lm_head finds them.  0: drafts read "
        f"all of lm_head.  Default: {COUNT} with a vocabulary of {LEAST_VOCABULARY:,} tokens or more.")] = None,
    kernels: Annotated[Path | None, typer.Option(
        "--kernels", help="For 4bit: the file of `flowspec device kernels --out` on a board.  Default: "
        "measure this machine.", metavar="FILE")] = None,
    draft: Annotated[list[Path] | None, typer.Option(
        "--draft", help="A draft model to include: an EAGLE head, a small model or another kind; may be given "
        "several times.  Those of a model of flowspec are included anyway.",
        metavar="DIR")] = None,
) -> None:
    """Split a model into one part per device: stage-1 … stage-N, draft, and a manifest with all sha256.

    Only a few MB of the model are in memory at a time.  An interrupted command resumes.  4-bit weights are
    quantised here; boards never get the full matrices.

    Examples:

      flowspec models shard --model ./Llama-2-13b-chat --draft ./EAGLE-13B --stages 4 --dtype int4 --out 13b
      flowspec models shard --model demo --split 2,3,3 --out demo-3
    """
    lengths = parse_counts(split, "--split") if split is not None else None
    if kernels is not None and dtype != "4bit":
        raise UsageError("--kernels goes with --dtype 4bit")
    stored = _stored_dtype(dtype, kernels)

    require_name(model)  # a wrong name is found before torch is imported
    for directory in draft or []:
        if not directory.is_dir():
            raise UsageError(f"no draft model at {directory}: give the directory of a head with --draft, or "
                             "leave it out to take those of the model")
    from flowspec_edge.sharding.job import finished, run, total_size
    from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
    from flowspec_edge.sharding.source import open_source

    source = open_source(model, draft or [])
    ranges = ranges_for(source.layers, stages, lengths)
    plan = make_plan(source, recipe_for(source, stored, group, compute_dtype, lm_head, kv_cache, candidates),
                     ranges)
    if finished(plan, out) is not None:
        print(f"{out} is finished already; inspect it with: flowspec models inspect {out}")
        return
    from flowspec_edge.cli.common.clusters import first_interrupt

    interrupted = Event()
    try:
        # Inside a library the exception of a Ctrl-C might become another one, with a traceback.
        with first_interrupt(interrupted.set), _bar("sharding", total_size(plan)) as progress:
            def written(count: int) -> None:
                progress(count)
                if interrupted.is_set():
                    raise KeyboardInterrupt

            run(plan, out, written)
    except KeyboardInterrupt:
        typer.echo(f"flowspec: interrupted; the same command resumes in {out}", err=True)
        raise
    print(f"{out}: {_summary(plan)}; inspect it with: flowspec models inspect {out}")


def inspect(
    directory: _Directory,
    context: Annotated[int, typer.Option(
        "--context", help="Maximum tokens that the caches hold.", metavar="N", min=1, max=MOST_TOKENS)] = 4096,
    as_json: _Json = False,
) -> None:
    """Print the layers, files and memory of each part of a sharded model.

    Memory is weights in the compute dtype plus keys and values of --context tokens; for D0 with every draft
    model.  Activations and the interpreter are not included.

    Examples:

      flowspec models inspect llama-13b --context 2048
    """
    model = OpenModel(directory)
    manifest = model.require_manifest()
    rows = _figures(manifest, context)
    if as_json:
        print(json.dumps({"source": manifest.source.model_dump(), "dtype": manifest.dtype,
                          "compute_dtype": manifest.compute_dtype, "model_type": manifest.model_type,
                          "quantisation": manifest.quantisation and manifest.quantisation.model_dump(),
                          "lm_head": manifest.lm_head and manifest.lm_head.model_dump(),
                          "kv_cache": manifest.kv_cache, "candidates": manifest.candidates,
                          "layers": manifest.layers, "context": context, "parts": rows}, indent=2))
        return
    _print_table(manifest, rows, context)
    if (model.home / "config.json").is_file() and context > (limit := model.max_positions):
        print(plain(f"a text of {manifest.source.name} has at most {limit} tokens: caches of {context} rows are for "
                    f"several requests at once, else give --context {limit}"))


def verify(directory: _Directory, as_json: _Json = False) -> None:
    """Check every file of a sharded model against its manifest.

    A board needs only its own part; missing parts are listed.  Exit code 1 if a file is missing, altered or
    not in the manifest.

    Examples:

      flowspec models verify llama-13b
    """
    manifest = OpenModel(directory).require_manifest()
    local_parts = [name for name in manifest.parts if manifest.has_part(name)]
    absent = [name for name in manifest.parts if name not in local_parts]
    if not local_parts:
        raise FlowspecError(f"{directory} has none of the parts {', '.join(manifest.parts)}: copy one beside "
                            "manifest.json")
    problems: dict[str, str] = {}
    with _bar("verifying", sum(manifest.part(name).size for name in local_parts)) as progress:
        for name in local_parts:
            try:
                manifest.check(name, progress)
            except FlowspecError as error:
                problems[name] = str(error)
    if as_json:
        print(json.dumps({"sound": [n for n in local_parts if n not in problems], "wrong": problems, "absent": absent},
                         indent=2))
    else:
        for name in local_parts:
            print(f"{name}: {problems.get(name) or f'{len(manifest.part(name).files)} files are as written'}")
        for name in absent:
            print(f"{name}: not here")
    if problems:
        first = next(iter(problems.values()))
        raise FlowspecError(first if len(problems) == 1 else f"{len(problems)} parts are wrong, the first: {first}")


def _stored_dtype(dtype: StoredDtype | None, kernels: Path | None) -> ShardDtype | None:
    if dtype != "4bit":
        return dtype
    if kernels is None:
        return _fastest_here()
    from flowspec_edge.model.manifest import QuantKind

    try:
        fastest = read_json(kernels)["fastest"]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{kernels} is not a file of `flowspec device kernels --out`: it has no key "
                         "\"fastest\"") from error
    if fastest is None:
        raise UsageError(f"{kernels} says that no 4-bit kind works on that device: use --dtype fp16 or bf16")
    if fastest not in get_args(QuantKind):
        raise UsageError(f"{kernels} says that {fastest!r} is the fastest, which is no 4-bit kind")
    return cast(QuantKind, fastest)


def _fastest_here() -> QuantKind:
    """Return the fastest 4-bit kind on this machine; measuring takes some seconds."""
    import torch

    from flowspec_edge.boards.measurement.kernels import measure_kernels

    report = measure_kernels("cuda" if torch.cuda.is_available() else "cpu")
    if report.fastest is None:
        raise UsageError("no 4-bit kind works on this machine: give a board's file of `flowspec device "
                         "kernels --out` as --kernels FILE, or name a kind")
    print(f"the fastest 4-bit kind on {report.name}: {report.fastest}")
    return report.fastest


def _summary(plan: ShardingPlan) -> str:
    recipe = plan.recipe
    precision: str = recipe.dtype
    if recipe.kind == "int4":
        precision += f" in groups of {recipe.group}"
    if recipe.lm_head is not None:
        precision += f", lm_head in {recipe.lm_head.kind}"
    if recipe.kv_cache != "16bit":
        precision += f", KV caches in {recipe.kv_cache}"
    if recipe.candidates:
        precision += f", {recipe.candidates} candidates of a draft row"
    if plan.int8:
        precision += f", {len(plan.int8)} matrices in int8"
    if plan.unquantised:
        precision += f", {len(plan.unquantised)} in 16 bits"
    drafts = ", ".join(draft.kind.name for draft in plan.source.drafts) or "no draft model"
    return f"{counted_stages(len(plan.ranges))}, {precision}, {drafts}"


def _figures(manifest: Manifest, context: int) -> list[dict[str, Any]]:
    """Return a row for each part, D0's last."""
    from flowspec_edge.model.manifest import DRAFT

    rows = []
    for name, part in manifest.parts.items():
        layers = None if name == DRAFT else manifest.ranges[int(name.rpartition("-")[2]) - 1]
        rows.append({
            "part": name, "layers": layers, "parameters": part.parameters, "disk_bytes": part.size,
            "weight_bytes": part.weight_bytes, "cache_bytes": part.cache_bytes(context),
            "memory_bytes": part.weight_bytes + part.cache_bytes(context), "here": manifest.has_part(name),
        })
    return rows


def _print_table(manifest: Manifest, rows: list[dict[str, Any]], context: int) -> None:
    from rich.console import Console
    from rich.table import Table

    quantisation = manifest.quantisation
    kind = f"{quantisation.kind} in groups of {quantisation.group}" if quantisation else manifest.dtype
    if manifest.lm_head:
        kind += f", lm_head in {manifest.lm_head.kind} in groups of {manifest.lm_head.group}"
    if manifest.kv_cache != "16bit":
        kind += f", KV caches in {manifest.kv_cache}"
    if manifest.candidates:
        kind += f", {manifest.candidates} candidates of a draft row"
    about = (f"{manifest.source.name}: {manifest.model_type}, {manifest.layers} layers of width "
             f"{manifest.hidden_width}, {kind}, computing in {manifest.compute_dtype}; caches of {context} "
             "rows; sizes in MB")
    table = Table(title=plain(about), title_justify="left")
    table.add_column("part", no_wrap=True)
    for heading in ("layers", "parameters", "on disk", "weights", "cache", "in memory"):
        table.add_column(heading, justify="right")
    for row in rows:
        layers = f"{row['layers'][0]}–{row['layers'][1] - 1}" if row["layers"] else "–"
        sizes = [f"{row[f'{quantity}_bytes'] / 1e6:,.1f}" for quantity in ("disk", "weight", "cache", "memory")]
        table.add_row(plain(row["part"]) + ("" if row["here"] else " (not here)"), layers,
                      f"{row['parameters'] / 1e6:,.1f} M", *sizes)
    Console().print(table)
    if quantisation and quantisation.int8:
        print(f"{len(quantisation.int8)} matrices are in int8: the GGUF file has them in other blocks than those of "
              "4 bits")
    if quantisation and quantisation.kept:
        print(f"{len(quantisation.kept)} matrices stay in 16 bits: no group divides them, or the GGUF file has them so")


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    done_bytes = 0
    with (plain_lines(lambda seconds: f"{title}: {done_of(done_bytes / 1e6, total / 1e6, seconds, 'MB')}"),
          Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress):
        task = progress.add_task(title, total=total)

        def advance(done: int) -> None:
            nonlocal done_bytes
            done_bytes += done
            progress.advance(task, done)

        yield advance
