"""``flowspec sweep``: the same measurement at several values of one axis, a command for each axis."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowspec_edge.cli.bench.options import PAPER, BenchOptions, measured_by_default
from flowspec_edge.cli.common.option_groups import with_dataclasses
from flowspec_edge.cli.common.options import MOST_STAGES, OUTPUT, TIME, BoardModelOption, FigureOption
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params

if TYPE_CHECKING:
    from flowspec_edge.bench.sweeps.sweep import Links

app = typer.Typer(help="How tokens/s change with the links, the stages, the segment, the tree.",
                  no_args_is_help=True)

_FIGURE_5 = "megatron,galaxy,chunk_pp,pipedec,flowspec,flowspec_plus"
_SEGMENTED = "chunk_pp,pruned_pp,flowspec,flowspec_plus"  # PipeDec's layers have a width of their own
# One temperature; --links decides the clock; requests run one by one.
_HIDDEN_OPTIONS = ("temperatures", "clock", "emulate", "clients", "arrival_rate")
_VIRTUAL = (*_HIDDEN_OPTIONS, "idle_seconds")
_RARE = ("top_k", "top_p", "repeats")

LinksOption = Annotated[Literal["virtual", "namespaces"], typer.Option(
    "--links", help="virtual: time simulated by the profile.  namespaces: real processes over real, shaped "
                    "links on this machine.", rich_help_panel=TIME)]
ClusterOption = Annotated[Path | None, typer.Option(
    "--cluster", help="Measure the boards of this cluster.toml; this machine is the draft device.",
    metavar="FILE", show_default=False, rich_help_panel=TIME)]
PublishedOption = Annotated[bool, typer.Option(
    "--published/--no-published", help="Show the paper's figures too, if the profile is its testbed.",
    hidden=True, rich_help_panel=OUTPUT)]



@with_dataclasses(without=_HIDDEN_OPTIONS, strategies=measured_by_default(_FIGURE_5), rare=_RARE,
                  options=BenchOptions, sampling=Sampling, params=PAPER)
def bandwidth(
    mbps: Annotated[str, typer.Option("--mbps", help="Bandwidths of every link, in 10^6 bits a second.",
                                      metavar="N,N")] = "1000,500,250,125",
    links: LinksOption = "virtual",
    cluster: ClusterOption = None,
    board_model: BoardModelOption = None,
    figure: FigureOption = None,
    published: PublishedOption = True,
    *,
    options: BenchOptions,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s against the bandwidth of the links: Figure 5 of the FlowSpec paper.

    By default its five methods (megatron, galaxy, chunk_pp, pipedec, flowspec) and flowspec_plus, all
    drafting with EAGLE-2 as in the paper.

    With --links namespaces every device is a process in its own network namespace that takes the profile's
    time and sends the profile's bytes, and the kernel shapes its traffic.  Needs root; everything is removed
    at the end.

    With --cluster the boards run in their own time, over ssh; run it on the draft device.  All traffic but
    ssh and the control channel is shaped.  A board removes the shaping after five minutes without contact.

    Examples:

      flowspec sweep bandwidth --limit 4 --out bandwidth.svg
      flowspec sweep bandwidth --mbps 1000,100,10 --strategies chunk_pp,flowspec --json b.json --resume
      sudo flowspec sweep bandwidth --links namespaces --limit 2 --max-new-tokens 48
      flowspec sweep bandwidth --cluster cluster.toml --model llama-2-7b --json real.json
    """
    from flowspec_edge.cli.sweep.measure import SweepRequest, parse_numbers, run_sweep

    if cluster is not None and links == "namespaces":
        raise UsageError("give --cluster or --links namespaces, not both: a cluster has its own links")
    link_kind: Links = "cluster" if cluster is not None else links
    request = SweepRequest("bandwidth", parse_numbers(mbps, "--mbps"), _FIGURE_5, link_kind,
                           emulated=link_kind == "namespaces", published=published, cluster=cluster,
                           board_model=board_model)
    run_sweep(request, options, sampling, params, figure)


@with_dataclasses(without=(*_VIRTUAL, "depth", "expand_depth"), strategies=measured_by_default("flowspec"),
                  rare=_RARE, options=BenchOptions, sampling=Sampling, params=PAPER)
def depth(
    depths: Annotated[str, typer.Option("--depths", help="Levels of the initial tree (d0).",
                                        metavar="N,N")] = "3,4,5,6,7,8",
    expand_depths: Annotated[str, typer.Option(
        "--expand-depths", help="Levels of a context-aware expansion (d_exp).", metavar="N,N",
    )] = "3,4,5,6,7,8",
    figure: FigureOption = None,
    published: PublishedOption = True,
    *,
    options: BenchOptions,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s for every pair of tree depths: Figure 6 of the FlowSpec paper.

    The default strategy is flowspec.

    Examples:

      flowspec sweep depth --limit 2 --out depth.png
      flowspec sweep depth --depths 3,5,8 --expand-depths 3,5 --json depth.json
    """
    from flowspec_edge.cli.sweep.measure import SweepRequest, distinct_counts, run_sweep

    pairs = list(product(distinct_counts(depths, "--depths"),
                         distinct_counts(expand_depths, "--expand-depths")))
    request = SweepRequest("depth", pairs, "flowspec", published=published)
    run_sweep(request, options, sampling, params, figure)


@with_dataclasses(without=(*_VIRTUAL, "stages"), strategies=measured_by_default(_FIGURE_5), rare=_RARE,
                  options=BenchOptions, sampling=Sampling, params=PAPER)
def stages(
    counts: Annotated[str, typer.Option("--stages", help="Verification devices V1…VN.",
                                        metavar="N,N")] = "2,4,8,14,32",
    figure: FigureOption = None,
    *,
    options: BenchOptions,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s against the number of stages.

    More stages have fewer layers each.  The default methods are those of sweep bandwidth.

    Examples:

      flowspec sweep stages --limit 2 --max-new-tokens 64
      flowspec sweep stages --stages 4,8 --strategies all --set draft=own --out stages.svg
    """
    from flowspec_edge.cli.sweep.measure import SweepRequest, distinct_counts, run_sweep

    numbers = distinct_counts(counts, "--stages")
    if max(numbers) > MOST_STAGES:
        raise UsageError(f"--stages must be at most {MOST_STAGES}, not {max(numbers)}")
    request = SweepRequest("stages", numbers, _FIGURE_5)
    run_sweep(request, options, sampling, params, figure)


@with_dataclasses(without=(*_VIRTUAL, "segment"), strategies=measured_by_default(_SEGMENTED), rare=_RARE,
                  options=BenchOptions, sampling=Sampling, params=PAPER)
def segment(
    rows: Annotated[str, typer.Option("--rows", help="Longest segments (l), in rows.",
                                      metavar="N,N")] = "4,8,16,32,64",
    figure: FigureOption = None,
    *,
    options: BenchOptions,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s against the longest segment.

    By default of pruned_pp and flowspec, and of chunk_pp, which always cuts its tree into one chunk more than
    there are stages.  A turn is the time of one full segment, so ALT at two lengths cannot be compared.

    Examples:

      flowspec sweep segment --limit 2 --max-new-tokens 64
      flowspec sweep segment --rows 16,32,48 --profile orin-nano-8gb
    """
    from flowspec_edge.cli.sweep.measure import SweepRequest, distinct_counts, run_sweep

    request = SweepRequest("segment", distinct_counts(rows, "--rows"), _SEGMENTED)
    run_sweep(request, options, sampling, params, figure)


@with_dataclasses(without=_VIRTUAL, strategies=measured_by_default(_FIGURE_5), rare=_RARE,
                  options=BenchOptions, sampling=Sampling, params=PAPER)
def latency(
    ms: Annotated[str, typer.Option("--ms", help="Latencies of every link, one way, in milliseconds.",
                                    metavar="T,T")] = "0.1,0.5,1,2,5,10",
    figure: FigureOption = None,
    *,
    options: BenchOptions,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s against the latency of the links.

    The default methods are those of sweep bandwidth.

    Examples:

      flowspec sweep latency --limit 2 --max-new-tokens 64
      flowspec sweep latency --ms 0,1,20 --strategies flowspec,megatron
    """
    from flowspec_edge.cli.sweep.measure import SweepRequest, parse_numbers, run_sweep

    request = SweepRequest("latency", parse_numbers(ms, "--ms", zero=True), _FIGURE_5)
    run_sweep(request, options, sampling, params, figure)


for _command in (bandwidth, depth, stages, segment, latency):
    app.command(_command.__name__)(_command)
