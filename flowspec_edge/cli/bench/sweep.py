"""``flowspec sweep``: the same measurement at several values of one axis, a command for each axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from flowspec_edge.cli.bench.options import PAPER, BenchOptions, measured_by_default
from flowspec_edge.cli.common.option_groups import with_dataclasses
from flowspec_edge.cli.common.options import (
    MOST_STAGES,
    OUTPUT,
    TIME,
    BoardModelOption,
    FigureOption,
    parse_counts,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params

if TYPE_CHECKING:
    from flowspec_edge.cli.bench.measure import MeasureRequest
    from flowspec_edge.lab.bench.axes import AxisName

app = typer.Typer(help="How tokens/s change with the links, the stages, the segment, the tree.",
                  no_args_is_help=True)

_FIGURE_5 = "megatron,galaxy,chunk_pp,pipedec,flowspec,flowspec_plus"
_SEGMENTED = "chunk_pp,pruned_pp,flowspec,flowspec_plus"  # PipeDec's layers have a width of their own
# One temperature; --links decides the clock; requests run one by one.
_HIDDEN_OPTIONS = ("temperatures", "clock", "emulate", "clients", "arrival_rate")
_RARE = ("top_k", "top_p", "min_p", "repeats")
_Number = TypeVar("_Number", int, "int | float")
_MOST = 1e9  # Mbit/s or ms: more than any link

LinksOption = Annotated[Literal["virtual", "namespaces"], typer.Option(
    "--links", help="virtual: time simulated by the profile.  namespaces: real processes over real, shaped "
                    "links on this machine.", rich_help_panel=TIME)]
ClusterOption = Annotated[Path | None, typer.Option(
    "--cluster", help="Measure the boards of this cluster.toml; this machine is the draft device.",
    metavar="FILE", show_default=False, rich_help_panel=TIME)]
PublishedOption = Annotated[bool, typer.Option(
    "--published/--no-published", help="Show the paper's figures too, if the profile is its testbed.",
    hidden=True, rich_help_panel=OUTPUT)]


Ask = Callable[..., dict[str, Any]]  # from an axis' own options to fields of ``MeasureRequest``


def _sweep(axis: AxisName, strategies: str, *without: str) -> Callable[[Ask], Ask]:
    """Make the axis' command: its own options, --out, and a benchmark's but ``without``.

    ``strategies``: those without --strategies.
    """
    def decorate(ask: Ask) -> Ask:
        @wraps(ask)
        def command(*, figure: Path | None, options: BenchOptions, sampling: Sampling, params: Params,
                    **own: object) -> None:
            from flowspec_edge.cli.bench.measure import MeasureRequest
            from flowspec_edge.lab.bench.axes import AXES

            request = MeasureRequest(strategies, axis=AXES[axis], label="sweep", **ask(**own))
            _run(request, options, sampling, params, figure)

        kind = inspect.Parameter.KEYWORD_ONLY
        shared = [inspect.Parameter("figure", kind, default=None, annotation=FigureOption),
                  *(inspect.Parameter(name, kind) for name in ("options", "sampling", "params"))]
        own = inspect.signature(ask, eval_str=True).parameters.values()
        command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        with_options = with_dataclasses((*_HIDDEN_OPTIONS, *without), measured_by_default(strategies), _RARE,
                                        options=BenchOptions, sampling=Sampling, params=PAPER)
        app.command(axis)(with_options(command))
        return ask

    return decorate


@_sweep("bandwidth", _FIGURE_5)
def bandwidth(
    *,
    mbps: Annotated[str, typer.Option("--mbps", help="Bandwidths of every link, in 10^6 bits a second.",
                                      metavar="N,N")] = "1000,500,250,125",
    links: LinksOption = "virtual",
    cluster: ClusterOption = None,
    board_model: BoardModelOption = None,
    published: PublishedOption = True,
) -> dict[str, Any]:
    """Measure tokens/s against the bandwidth of the links: Figure 5 of the FlowSpec paper.

    By default its five methods (megatron, galaxy, chunk_pp, pipedec, flowspec) and flowspec_plus, all
    drafting with EAGLE-2 as in the paper.  megatron and galaxy are computed whole and charged as groups of
    devices, so they are left out where processes or boards run.

    With --links namespaces every device is a process in its own network namespace that takes the profile's
    time and sends the profile's bytes, and the kernel shapes its traffic.  Needs root; everything is removed
    at the end.

    With --cluster the boards run in their own time, over ssh; run it on the draft device.  All traffic but
    ssh and the control channel is shaped.  A board removes the shaping after five minutes without contact.

    Examples:

      flowspec sweep bandwidth --limit 4 --out bandwidth.svg
      flowspec sweep bandwidth --limit 2 --profile agx-orin-64gb:1,orin-nano-8gb-super:3/qwen3-8b/int4
      flowspec sweep bandwidth --mbps 1000,100,10 --strategies chunk_pp,flowspec --json b.json --resume
      sudo flowspec sweep bandwidth --links namespaces --limit 2 --max-new-tokens 48
      flowspec sweep bandwidth --cluster cluster.toml --model llama-2-7b --json real.json
    """
    if cluster is not None and links == "namespaces":
        raise UsageError("give --cluster or --links namespaces, not both: a cluster has its own links")
    return {"values": _numbers(mbps, "--mbps"), "published": published, "cluster": cluster,
            "links": links if cluster is None else "cluster", "board_model": board_model}


@_sweep("depth", "flowspec", "idle_seconds", "depth", "expand_depth")
def depth(
    *,
    depths: Annotated[str, typer.Option("--depths", help="Levels of the initial tree (d0).",
                                        metavar="N,N")] = "3,4,5,6,7,8",
    expand_depths: Annotated[str, typer.Option(
        "--expand-depths", help="Levels of a context-aware expansion (d_exp).", metavar="N,N",
    )] = "3,4,5,6,7,8",
    published: PublishedOption = True,
) -> dict[str, Any]:
    """Measure tokens/s for every pair of tree depths: Figure 6 of the FlowSpec paper.

    The default strategy is flowspec.

    Examples:

      flowspec sweep depth --limit 2 --out depth.png
      flowspec sweep depth --depths 3,5,8 --expand-depths 3,5 --json depth.json
    """
    pairs = product(_counts(depths, "--depths"), _counts(expand_depths, "--expand-depths"))
    return {"values": list(pairs), "published": published}


@_sweep("stages", _FIGURE_5, "idle_seconds", "stages")
def stages(
    *,
    counts: Annotated[str, typer.Option("--stages", help="Verification devices V1…VN.",
                                        metavar="N,N")] = "2,4,8,14,32",
) -> dict[str, Any]:
    """Measure tokens/s against the number of stages.

    More stages have fewer layers each.  The default methods are those of sweep bandwidth.

    Examples:

      flowspec sweep stages --limit 2 --max-new-tokens 64
      flowspec sweep stages --stages 4,8 --strategies all --set draft=own --out stages.svg
    """
    numbers = _counts(counts, "--stages")
    if max(numbers) > MOST_STAGES:
        raise UsageError(f"--stages must be at most {MOST_STAGES}, not {max(numbers)}")
    return {"values": numbers}


@_sweep("segment", _SEGMENTED, "idle_seconds", "segment")
def segment(
    *,
    rows: Annotated[str, typer.Option("--rows", help="Longest segments (l), in rows.",
                                      metavar="N,N")] = "4,8,16,32,64",
) -> dict[str, Any]:
    """Measure tokens/s against the longest segment.

    By default of pruned_pp and flowspec, and of chunk_pp, which always cuts its tree into one chunk more than
    there are stages.  A turn is the time of one full segment, so ALT at two lengths cannot be compared.

    Examples:

      flowspec sweep segment --limit 2 --max-new-tokens 64
      flowspec sweep segment --rows 16,32,48 --profile orin-nano-8gb
    """
    return {"values": _counts(rows, "--rows")}


@_sweep("latency", _FIGURE_5, "idle_seconds")
def latency(
    *,
    ms: Annotated[str, typer.Option("--ms", help="Latencies of every link, one way, in milliseconds.",
                                    metavar="T,T")] = "0.1,0.5,1,2,5,10",
) -> dict[str, Any]:
    """Measure tokens/s against the latency of the links.

    The default methods are those of sweep bandwidth.

    Examples:

      flowspec sweep latency --limit 2 --max-new-tokens 64
      flowspec sweep latency --ms 0,1,20 --strategies flowspec,megatron
    """
    return {"values": _numbers(ms, "--ms", zero=True)}


@_sweep("acceptance", "chunk_pp,chain,flowspec,flowspec_plus", "idle_seconds", "acceptance")
def acceptance(
    *,
    of: Annotated[str, typer.Option(
        "--acceptance", metavar="T,T",
        help="Numbers as for bench run's --acceptance: 1 is the draft model's own, 2 a perfect one's, 0 "
             "misses every right token that it does not rank first.")] = "0,0.65,1,1.4,1.7,1.9,2",
) -> dict[str, Any]:
    """Measure tokens/s against how often drafts are right: which way to fill a pipeline pays for which head.

    By default a synchronous tree (chunk_pp), a chain in flight that a miss flushes (chain), FlowSpec's rounds
    and FlowSpec+, all drafting with the same head.

    Examples:

      flowspec sweep acceptance --limit 4 --out acceptance.svg
      flowspec sweep acceptance --acceptance 1,1.5,2 --temperature 1 --stages 8 --json a.json
    """
    values = _numbers(of, "--acceptance", zero=True)
    if max(values) > 2:
        raise UsageError(f"--acceptance must be numbers from 0 to 2, not {of!r}")
    return {"values": values}


def _numbers(text: str, option: str, zero: bool = False) -> list[int | float]:
    """Distinct numbers separated by commas; ``zero``: 0 is allowed."""
    kind = "numbers of at least 0" if zero else "positive numbers"
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= n <= _MOST and (n or zero) for n in found):
        raise UsageError(f"{option} must be {kind} separated by commas, not {text!r}")
    return _require_distinct([int(n) if n.is_integer() else n for n in found], option)


def _counts(text: str, option: str) -> list[int]:
    return _require_distinct(parse_counts(text, option), option)


def _require_distinct(values: list[_Number], option: str) -> list[_Number]:
    twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if twice is not None:
        raise UsageError(f"{option} names {twice:g} twice")
    return values


def _run(request: MeasureRequest, options: BenchOptions, sampling: Sampling, params: Params,
         figure: Path | None) -> None:
    """Measure, save, print and draw; an error at the end if a text differs from plain decoding's."""
    from rich.console import Console

    from flowspec_edge.cli.bench.measure import measure
    from flowspec_edge.cli.common.workload import fail_if_different
    from flowspec_edge.lab.bench.plots import plot_sweep
    from flowspec_edge.lab.bench.results import Sweep
    from flowspec_edge.lab.bench.tables import show, sweep_notes, sweep_tables
    from flowspec_edge.util.terminal import printable

    sweep = measure(request, options, sampling, params, figure)
    assert isinstance(sweep, Sweep)
    console = Console()
    say = partial(console.print, soft_wrap=True, highlight=False, markup=False)
    for caption, made in sweep_tables(sweep):
        say(printable(caption))
        show(console, made)
    for line in sweep_notes(sweep):
        say(printable(line))
    if figure is not None:
        plot_sweep(sweep, figure)
    fail_if_different(sweep.different_texts())
