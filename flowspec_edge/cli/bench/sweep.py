"""``flowspec sweep AXIS=V,V``: the same measurement at several values of one axis, or over a grid of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from flowspec_edge.cli.bench.options import PAPER, BenchOptions, parse_strategies
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
    from flowspec_edge.lab.bench.axes import Axis, Scalar, Value

_FIGURE_5 = "megatron,galaxy,chunk_pp,pipedec,flowspec,flowspec_plus"
_SEGMENTED = "chunk_pp,pruned_pp,flowspec,flowspec_plus"  # PipeDec's layers have a width of their own
_ALL_DRAFT = "flowspec,flowspec_plus"  # over a parameter that every strategy has
# One temperature; --links decides the clock; requests run one by one.
_HIDDEN_OPTIONS = ("temperatures", "clock", "emulate", "clients", "arrival_rate")
_RARE = ("top_k", "top_p", "min_p", "repeats", "stages")
_MOST = 1e9  # Mbit/s or ms: more than any link

AxesArgument = Annotated[list[str], typer.Argument(
    metavar="AXIS[=V,V]", show_default=False,
    help="bandwidth (Mbps), latency (ms), stages, segment (rows), acceptance, depth (with expand_depth), or a "
         "strategy's parameter; two parameters make a grid.  Only these six have values by default.")]
LinksOption = Annotated[Literal["virtual", "namespaces"], typer.Option(
    "--links", help="virtual: time simulated by the profile.  namespaces: real processes over real, shaped "
                    "links on this machine; for the axis bandwidth.", rich_help_panel=TIME)]
ClusterOption = Annotated[Path | None, typer.Option(
    "--cluster", help="Measure the boards of this cluster.toml.  The axis must be bandwidth, or parameters of "
                      "strategies.  This machine must be the draft device.",
    metavar="FILE", show_default=False, rich_help_panel=TIME)]
PublishedOption = Annotated[bool, typer.Option(
    "--published/--no-published", help="Show the paper's figures too, if the profile is its testbed.",
    hidden=True, rich_help_panel=OUTPUT)]


def _numbers(text: str, name: str, zero: bool = False) -> list[Scalar]:
    """Read numbers separated by commas; ``zero`` allows 0."""
    kind = "numbers of at least 0" if zero else "positive numbers"
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= n <= _MOST and (n or zero) for n in numbers):
        raise UsageError(f"{name} must be {kind} separated by commas, not {text!r}")
    return [int(n) if n.is_integer() else n for n in numbers]


def _counts(text: str, name: str) -> list[Scalar]:
    return [*parse_counts(text, name)]


def _stage_counts(text: str, name: str) -> list[Scalar]:
    counts = parse_counts(text, name)
    if max(counts) > MOST_STAGES:
        raise UsageError(f"{name} must be at most {MOST_STAGES}, not {max(counts)}")
    return [*counts]


def _shares(text: str, name: str) -> list[Scalar]:
    shares = _numbers(text, name, zero=True)
    if any(isinstance(value, int | float) and value > 2 for value in shares):
        raise UsageError(f"{name} must be numbers from 0 to 2, not {text!r}")
    return shares


@dataclass(frozen=True)
class _Named:
    """An axis' values and strategies without any that were given, and how its values are read."""

    values: str
    read: Callable[[str, str], list[Scalar]]
    strategies: str


_NAMED = {
    "bandwidth": _Named("1000,500,250,125", _numbers, _FIGURE_5),
    "latency": _Named("0.1,0.5,1,2,5,10", partial(_numbers, zero=True), _FIGURE_5),
    "stages": _Named("2,4,8,14,32", _stage_counts, _FIGURE_5),
    "segment": _Named("4,8,16,32,64", _counts, _SEGMENTED),
    "acceptance": _Named("0,0.65,1,1.4,1.7,1.9,2", _shares, "chunk_pp,chain,flowspec,flowspec_plus"),
}
_DEPTHS = ("depth", "expand_depth")  # Figure 6's pair
_EVERY_DEPTH = "3,4,5,6,7,8"

class _SweepCommand(TyperCommand):
    """A command that shows its help if it has no arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "no_args_is_help": True})


@dataclass(frozen=True)
class _SweepAxes:
    """What the arguments name: an axis, its values in the order of measurement, strategies by default."""

    axis: Axis
    values: Sequence[Value]
    strategies: str


def _parse_axes(arguments: Sequence[str]) -> _SweepAxes:
    """Raise UsageError for what is no axis, and for values that the axis cannot have."""
    from flowspec_edge.lab.bench.axes import AXES, parameter_axis

    texts: dict[str, str] = {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        name = name.strip().replace("-", "_")
        if name in texts:
            raise UsageError(f"the axis {name} is given twice")
        if "=" in argument and not text.strip():
            raise UsageError(f"{name}= has no values, such as {name}=1,2")
        texts[name] = text
    if "depth" in texts and texts.keys() <= {*_DEPTHS}:
        sides = [_distinct(_counts(texts.get(name) or _EVERY_DEPTH, name), name) for name in _DEPTHS]
        return _SweepAxes(AXES["depth"], list(product(sides[0], sides[1])), "flowspec")
    if len(texts) == 1 and (name := next(iter(texts))) in _NAMED:
        named_axis = _NAMED[name]
        return _SweepAxes(AXES[name], _distinct(named_axis.read(texts[name] or named_axis.values, name), name),
                          named_axis.strategies)
    if links := [name for name in texts if name in AXES and name not in ("segment", "depth")]:
        raise UsageError(f"{links[0]} is swept alone: only two parameters of strategies make a grid")
    axis = parameter_axis([*texts])
    columns = [_parameter_values(name, text) for name, text in texts.items()]
    values: list[Value] = [*columns[0]] if len(columns) == 1 else list(product(columns[0], columns[1]))
    return _SweepAxes(axis, values, _strategies_with([*texts]))


def _parameter_values(name: str, text: str) -> list[Scalar]:
    """Read numbers as such, and values of other parameters as texts."""
    from flowspec_edge.strategies.params import all_parameters

    parameter = all_parameters()[name]
    if not text:
        raise UsageError(f"{name} needs its values: flowspec sweep {name}=V,V ({parameter.range})")
    values: list[Scalar] = []
    for part in (part.strip() for part in text.split(",")):
        value = parameter.read(part)
        if value is not None:
            parameter.check(value)
        values.append(value if parameter.kind in (int, float) else part)
    return _distinct(values, name)


def _strategies_with(names: Sequence[str]) -> str:
    """Return the strategies that have every one of these parameters; FlowSpec's if all strategies have them."""
    from flowspec_edge.strategies.parameters import Parameters, parameters
    from flowspec_edge.strategies.registry import parameters_of, strategy_class, strategy_names

    if parameters(Parameters).keys() >= {*names}:
        return _ALL_DRAFT
    strategies = [name for name in strategy_names() if parameters_of(strategy_class(name)).keys() >= {*names}]
    if not strategies:
        raise UsageError(f"no strategy has both parameters {' and '.join(names)}")
    return ",".join(strategies)


def _distinct(values: list[Scalar], name: str) -> list[Scalar]:
    from flowspec_edge.lab.bench.axes import label

    twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if twice is not None:
        raise UsageError(f"{name} names {label(twice)} twice")
    return values


def _measured(arguments: Mapping[str, Any]) -> list[str]:
    """Return the strategies whose parameters ``--set`` takes."""
    names = arguments["options"].strategies
    return parse_strategies(_parse_axes(arguments["axes"]).strategies if names is None else names)


@with_dataclasses(_HIDDEN_OPTIONS, _measured, _RARE, options=BenchOptions, sampling=Sampling, params=PAPER)
def sweep(
    axes: AxesArgument,
    *,
    links: LinksOption = "virtual",
    cluster: ClusterOption = None,
    board_model: BoardModelOption = None,
    published: PublishedOption = True,
    figure: FigureOption = None,
    options: BenchOptions,
    sampling: Sampling,
    params: Params,
) -> None:
    """Measure tokens/s over the links, the stages, the drafts, or any parameter of a strategy.

    AXIS=V,V names what changes, and its values.  bandwidth is Figure 5 of the FlowSpec paper, with its five
    methods and flowspec_plus, all drafting with EAGLE-2; depth is Figure 6, every pair of tree depths.  Two
    parameters make a grid of all their pairs.  --set holds other parameters.  megatron and galaxy are computed
    whole and charged as groups of devices, so they are left out where processes or boards run.

    With --links namespaces every device is a process in its own network namespace that takes the profile's
    time and sends the profile's bytes, and the kernel shapes its traffic.  Needs root; everything is removed
    at the end.

    With --cluster the boards run in their own time, over ssh; run it on the draft device.  For bandwidth, all
    traffic but ssh and the control channel is shaped.  A board removes the shaping after five minutes without
    contact.

    Examples:

      flowspec sweep bandwidth --limit 4 --out bandwidth.svg
      flowspec sweep bandwidth=1000,100,10 --strategies chunk_pp,flowspec --json b.json --resume
      flowspec sweep bandwidth --limit 2 --profile agx-orin-64gb:1,orin-nano-8gb-super:3/qwen3-8b/int4
      sudo flowspec sweep bandwidth --links namespaces --limit 2 --max-new-tokens 48
      flowspec sweep bandwidth --cluster cluster.toml --model llama-2-7b --json real.json
      flowspec sweep depth=3,5,8 expand_depth=3,5 --json depth.json --out depth.png
      flowspec sweep stages=4,8 --strategies all --draft own --out stages.svg
      flowspec sweep segment=16,32,48 --profile orin-nano-8gb
      flowspec sweep latency=0,1,20 --strategies flowspec,megatron
      flowspec sweep acceptance=1,1.5,2 --temperature 1 --stages 8 --json a.json
      flowspec sweep tau=0.3,0.6,1.2 --temperature 1 --set rank=noise --limit 4
      flowspec sweep width=6,10,16 expand_size=32,64 --limit 4 --out grid.svg
    """
    from flowspec_edge.cli.bench.measure import MeasureRequest

    if options.strategies is not None:
        parse_strategies(options.strategies)  # a strategy from outside has parameters of its own
    chosen_axes = _parse_axes(axes)
    _require_room(chosen_axes.axis, links, cluster, options, params)
    request = MeasureRequest(
        chosen_axes.strategies, axis=chosen_axes.axis, values=chosen_axes.values, label="sweep", published=published,
        cluster=cluster, links=links if cluster is None else "cluster", board_model=board_model)
    _run(request, options, sampling, params, figure)


def _require_room(axis: Axis, links: str, cluster: Path | None, options: BenchOptions, params: Params) -> None:
    """Raise UsageError for options that hold what the axis changes, and for an axis that the links do not have."""
    if cluster is not None and links == "namespaces":
        raise UsageError("give --cluster or --links namespaces, not both: a cluster has its own links")
    if links == "namespaces" and axis.name != "bandwidth":
        raise UsageError(f"--links namespaces is for the axis bandwidth, not {axis.name}")
    if cluster is not None and axis.name != "bandwidth" and not axis.fields:
        raise UsageError(f"--cluster is for the axis bandwidth and for parameters of strategies; boards cannot "
                         f"change their {axis.title}")
    options_of_axes = {"stages": ("--stages", options.stages != 0),
                       "acceptance": ("--acceptance", options.acceptance != "head")}
    if axis.name in options_of_axes and options_of_axes[axis.name][1]:
        raise UsageError(f"{axis.name} is the axis of this sweep: leave {options_of_axes[axis.name][0]} out")
    before, now = PAPER().flat(), params.flat()
    for name in axis.fields:
        if now[name] != before[name]:
            raise UsageError(f"{name} is the axis of this sweep: leave --set {name} out")


sweep.command_class = _SweepCommand  # type: ignore[attr-defined]  # what ``LazyGroup`` asks a function for


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
    for caption, table in sweep_tables(sweep):
        say(printable(caption))
        show(console, table)
    for line in sweep_notes(sweep):
        say(printable(line))
    if figure is not None:
        plot_sweep(sweep, figure)
    fail_if_different(sweep.different_texts())
