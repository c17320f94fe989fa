"""``flowspec sweep``: the same measurement at several values of one axis, a command for each axis."""

from __future__ import annotations

from inspect import cleandoc
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowspec_edge.bench.sweep import Links
from flowspec_edge.cli.bench_options import Measuring
from flowspec_edge.cli.options import BoardModelOption, with_dataclasses
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params

app = typer.Typer(help="How tokens/s change with the links, the stages, the segment, the tree.",
                  no_args_is_help=True)

_FIGURE_5 = "megatron,galaxy,chunk_pp,pipedec,flowspec"
_SEGMENTED = "chunk_pp,pruned_pp,flowspec"  # PipeDec's layers have a width of their own
_PAPER = Params(draft="eagle2", pipedec_width=16)  # the FlowSpec paper's comparison, section V-A
_ALWAYS = ("temperatures", "clock", "emulate")  # one temperature; the links say whose clock it is

FigureOption = Annotated[Path | None, typer.Option(
    "--out", help="Draw it as a figure, too.", metavar="F.svg|F.png", show_default=False)]
LinksOption = Annotated[Literal["virtual", "namespaces"], typer.Option(
    "--links", help="virtual: time made up by the profile.  namespaces: real processes over real, shaped "
                    "links on this machine.")]
ClusterOption = Annotated[Path | None, typer.Option(
    "--cluster", help="Measure the boards of this cluster.toml, of which this machine is the draft device.",
    metavar="FILE", show_default=False)]
PublishedOption = Annotated[bool, typer.Option(
    "--published/--no-published", help="Show the paper's own figures beside, where the profile is its "
                                       "testbed.")]


@app.callback()
def group() -> None:
    """How tokens/s change with the links, the stages, the segment, the tree."""


@with_dataclasses(without=_ALWAYS, options=Measuring, sampling=Sampling, params=_PAPER)
def bandwidth(
    mbps: Annotated[str, typer.Option("--mbps", help="Bandwidths of every link, in 10^6 bits a second.",
                                      metavar="N,N")] = "1000,500,250,125",
    links: LinksOption = "virtual",
    cluster: ClusterOption = None,
    board_model: BoardModelOption = None,
    figure: FigureOption = None,
    published: PublishedOption = True,
    *,
    options: Measuring,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s against the bandwidth of the links: Figure 5 of the FlowSpec paper.

    Its five methods (megatron, galaxy, chunk_pp, pipedec, flowspec), all drafting with EAGLE-2 as
    in the paper, unless --strategies and --draft say otherwise.

    With --links namespaces the links are real: every device is a process in a network namespace of
    its own that takes the profile's time, its messages and collectives have the profile's bytes, and
    the kernel shapes what it sends.  That needs root; nothing of it outlives the command.

    With --cluster the boards are real, too, in their own time, over ssh; to be run on the draft
    device.  What they send is slowed down but for ssh and the control channel.  Every board restores
    itself if it hears nothing more for five minutes.
    """
    from flowspec_edge.cli.sweep_measuring import Asked, parse_numbers, run_sweep

    if cluster is not None and links == "namespaces":
        raise UsageError("give --cluster or --links namespaces, not both: a cluster has links of its own")
    way: Links = "cluster" if cluster is not None else links
    asked = Asked("bandwidth", parse_numbers(mbps, "--mbps"), _FIGURE_5, way, emulated=way == "namespaces",
                  published=published, cluster=cluster, board_model=board_model)
    run_sweep(asked, options, sampling, params, figure)


@with_dataclasses(without=(*_ALWAYS, "depth", "expand_depth"), options=Measuring, sampling=Sampling,
                  params=_PAPER)
def depth(
    depths: Annotated[str, typer.Option("--depths", help="Levels of the initial tree (d0).",
                                        metavar="N,N")] = "3,4,5,6,7,8",
    expand_depths: Annotated[str, typer.Option(
        "--expand-depths", help="Levels of a context-aware expansion (d_exp).", metavar="N,N",
    )] = "3,4,5,6,7,8",
    figure: FigureOption = None,
    published: PublishedOption = True,
    *,
    options: Measuring,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s for every pair of tree depths: Figure 6 of the FlowSpec paper.

    Of flowspec, unless --strategies names others.
    """
    from flowspec_edge.cli.sweep_measuring import Asked, parse_counts, run_sweep

    pairs = list(product(parse_counts(depths, "--depths"), parse_counts(expand_depths, "--expand-depths")))
    run_sweep(Asked("depth", pairs, "flowspec", published=published), options, sampling, params, figure)


@with_dataclasses(without=(*_ALWAYS, "stages"), options=Measuring, sampling=Sampling, params=_PAPER)
def stages(
    counts: Annotated[str, typer.Option("--stages", help="Verification devices V1…VN.",
                                        metavar="N,N")] = "2,4,8,14,32",
    figure: FigureOption = None,
    *,
    options: Measuring,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s against the number of stages.

    The profile's model keeps its layers: more stages cut it finer.  The methods are those of
    sweep bandwidth.
    """
    from flowspec_edge.cli.sweep_measuring import Asked, parse_counts, run_sweep

    run_sweep(Asked("stages", parse_counts(counts, "--stages"), _FIGURE_5), options, sampling, params, figure)


@with_dataclasses(without=(*_ALWAYS, "segment"), options=Measuring, sampling=Sampling, params=_PAPER)
def segment(
    rows: Annotated[str, typer.Option("--rows", help="Longest segments (l), in rows.",
                                      metavar="N,N")] = "4,8,16,32,64",
    figure: FigureOption = None,
    *,
    options: Measuring,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s against the longest segment.

    Of pruned_pp and flowspec, and of chunk_pp to compare with, which always cuts its tree into one
    chunk more than there are stages.  A turn is the time of one full segment, so ALT at two
    lengths cannot be compared.
    """
    from flowspec_edge.cli.sweep_measuring import Asked, parse_counts, run_sweep

    run_sweep(Asked("segment", parse_counts(rows, "--rows"), _SEGMENTED), options, sampling, params, figure)


@with_dataclasses(without=_ALWAYS, options=Measuring, sampling=Sampling, params=_PAPER)
def latency(
    ms: Annotated[str, typer.Option("--ms", help="Latencies of every link, one way, in milliseconds.",
                                    metavar="T,T")] = "0.1,0.5,1,2,5,10",
    figure: FigureOption = None,
    *,
    options: Measuring,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s against the latency of the links.

    The methods are those of sweep bandwidth.
    """
    from flowspec_edge.cli.sweep_measuring import Asked, parse_numbers, run_sweep

    run_sweep(Asked("latency", parse_numbers(ms, "--ms", zero=True), _FIGURE_5), options, sampling, params,
              figure)


_EXAMPLES = {
    bandwidth: """
  flowspec sweep bandwidth --limit 4 --out bandwidth.svg

  flowspec sweep bandwidth --mbps 1000,100,10 --strategies chunk_pp,flowspec --json b.json --resume

  sudo flowspec sweep bandwidth --links namespaces --limit 2 --max-new-tokens 48

  flowspec sweep bandwidth --cluster cluster.toml --model llama-2-7b --json real.json
""",
    depth: """
  flowspec sweep depth --limit 2 --out depth.png

  flowspec sweep depth --depths 3,5,8 --expand-depths 3,5 --json depth.json
""",
    stages: """
  flowspec sweep stages --limit 2 --max-new-tokens 64

  flowspec sweep stages --stages 4,8 --strategies all --draft own --out stages.svg
""",
    segment: """
  flowspec sweep segment --limit 2 --max-new-tokens 64

  flowspec sweep segment --rows 16,32,48 --profile orin-nano-8gb
""",
    latency: """
  flowspec sweep latency --limit 2 --max-new-tokens 64

  flowspec sweep latency --ms 0,1,20 --strategies flowspec,megatron
""",
}
for _command, _examples in _EXAMPLES.items():
    _command.__doc__ = f"{cleandoc(_command.__doc__ or '')}\n\nExamples:\n{_examples}"
    app.command(_command.__name__)(_command)
