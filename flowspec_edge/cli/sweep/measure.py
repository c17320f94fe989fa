"""A whole sweep, from its options to its output.  All options are checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from flowspec_edge.bench.run.runner import BenchPlan
from flowspec_edge.bench.sweeps.runner import measure_sweep, params_at, plan_at, stages_at, steps
from flowspec_edge.bench.sweeps.sweep import (
    UNITS,
    Axis,
    Clock,
    Links,
    PaperFigures,
    Sweep,
    Value,
    label,
    load_sweep,
)
from flowspec_edge.cli.bench.measure import (
    parallel_run,
    resume,
    settings_for,
    tasks_of,
    workloads_for,
)
from flowspec_edge.cli.bench.options import BenchOptions, parse_strategies
from flowspec_edge.cli.common.defaults import device_of, dtype_of, plain_device_of, stages_of
from flowspec_edge.cli.common.options import parse_counts
from flowspec_edge.cli.common.workload import (
    fail_if_different,
    near_tie_judge,
    plain_decoding,
    progress,
    require_runnable,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.planning.testbed import profile_or_testbed
from flowspec_edge.model.modeldir import resolve_model
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.util.terminal import printable

_SET: dict[Axis, tuple[str, ...]] = {"bandwidth": (), "latency": (), "stages": ("stages",),
                                     "segment": ("segment",), "depth": ("depth", "expand_depth")}


@dataclass(frozen=True)
class SweepRequest:
    """``values`` are in the order of measurement."""

    axis: Axis
    values: Sequence[Value]
    strategies: str  # without --strategies
    links: Links = "virtual"
    emulated: bool = False
    published: bool = True
    cluster: Path | None = None
    board_model: str | None = None

    @property
    def clock(self) -> Clock:
        return "virtual" if self.links == "virtual" else "wall"


_MOST = 1e9  # Mbit/s or ms: more than any link


def parse_numbers(text: str, option: str, zero: bool = False) -> list[Value]:
    """Distinct numbers separated by commas; ``zero``: 0 is allowed."""
    kind = "numbers of at least 0" if zero else "positive numbers"
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= n <= _MOST and (n or zero) for n in found):
        raise UsageError(f"{option} must be {kind} separated by commas, not {text!r}")
    return _require_distinct([int(n) if n.is_integer() else n for n in found], option)


def distinct_counts(text: str, option: str) -> list[int]:
    found = parse_counts(text, option)
    _require_distinct(found, option)
    return found


def _require_distinct(values: Sequence[Value], option: str) -> list[Value]:
    twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if twice is not None:
        raise UsageError(f"{option} names {label(twice)} twice")
    return list(values)


def run_sweep(request: SweepRequest, options: BenchOptions, sampling: Sampling, params: Params,
              figure: Path | None) -> None:
    """Measure, save, print and draw; an error at the end if a text differs from plain decoding's."""
    from rich.console import Console

    from flowspec_edge.bench.render.table import show
    from flowspec_edge.bench.sweeps.plots import plot_sweep
    from flowspec_edge.bench.sweeps.table import notes, tables

    sweep = measured(request, options, sampling, params, figure)
    console = Console()
    say = partial(console.print, soft_wrap=True, highlight=False, markup=False)
    for caption, made in tables(sweep):
        say(printable(caption))
        show(console, made)
    for line in notes(sweep):
        say(printable(line))
    if figure is not None:
        plot_sweep(sweep, figure)
    fail_if_different([f"at {label(value, UNITS[sweep.axis])}: {difference}"
                       for value, difference in sweep.differences()])


def measured(request: SweepRequest, options: BenchOptions, sampling: Sampling, params: Params,
             figure: Path | None = None, label: str = "sweep") -> Sweep:
    """Run everything and save it to ``options.out`` step by step; ``label``: before the progress."""
    from flowspec_edge.bench.render.plots import check_figure
    from flowspec_edge.bench.results.host_info import host_info
    from flowspec_edge.cli.sweep.links import SweepSetup, open_points, parallel_points
    from flowspec_edge.util.files import check_writable

    names = parse_strategies(options.strategies or request.strategies)
    model, profile = resolve_model(options.model), profile_or_testbed(options.profile)
    options = replace(options, stages=stages_of(model, options.stages), dtype=dtype_of(model, options.dtype))
    options.require_virtual(request.clock)
    tasks = tasks_of(options)
    if options.out is not None:
        check_writable(options.out)
    if figure is not None:
        check_figure(figure)
    inventory, reference = None, "cpu"
    if request.cluster is not None:
        from flowspec_edge.fleet.inventory import load_inventory

        if options.device != "auto":
            raise UsageError("give --cluster or --device, not both: the cluster file says torch_device")
        inventory = load_inventory(request.cluster)
        options = replace(options, stages=len(inventory.verify), device="cpu")
    for value in request.values:
        require_runnable(names, model, params_at(params, request.axis, value), request.clock,
                         stages_at(options.stages, request.axis, value))
    if inventory is None:
        most = max(stages_at(options.stages, request.axis, value) for value in request.values)
        processes = most + 1 if request.clock == "wall" else 1
        dtype = dtype_of(model, options.dtype)
        options = replace(options, device=device_of(options.device, model, dtype, processes=processes))
        reference = plain_device_of(options.device, model, dtype, processes)
    charged = profile if request.clock == "virtual" or request.emulated else None
    settings: dict[str, Any] = {**settings_for(options, tasks, model, charged, sampling, params),
                                "temperature": sampling.temperature}
    if inventory is not None:  # D0's first
        boards = (inventory.draft, *inventory.verify)
        settings["device"] = [inventory.torch_device(board) for board in boards]
    settings = {key: value for key, value in settings.items() if key not in _SET[request.axis]}
    profile_name = charged.name if charged else None
    sweep = resume(options, load_sweep, Sweep(
        request.axis, request.links, request.emulated, profile_name, request.clock, settings,
        host_info(options.device), str(date.today())), "axis", "links", "emulated")
    sweep.published = _published(request, settings, profile_name)
    plan = BenchPlan(names, workloads_for(options, tasks, model, sampling, params), [sampling.temperature],
                     options.repeats, options.warmup)
    plans = {value: plan_at(plan, request.axis, value) for value in request.values}

    def save() -> None:
        if options.out is not None:
            sweep.save(options.out)

    if total := steps(sweep, plans):
        setup = SweepSetup(request.axis, model, options.stages, profile, options.dtype, inventory,
                      request.board_model or str(model.path.resolve()), options.device, options.idle_seconds,
                      options.right_children)
        if options.parallel:
            run = parallel_run(options, model, names)
            open_parallel = parallel_points(run, setup)
            measure_sweep(deepcopy(sweep), plans, open_parallel, run.plain)  # lists the requests
            with run, progress(total, label) as advance:
                measure_sweep(sweep, plans, open_parallel, run.plain, advance, save,
                              near_tie_judge(model, options.dtype, reference))
            return sweep
        with open_points(request.links, setup) as open_point, progress(total, label) as advance:
            plain, explains = plain_decoding(model, options.dtype, reference)
            measure_sweep(sweep, plans, open_point, plain, advance, save, explains)
    return sweep


def _published(request: SweepRequest, settings: dict[str, Any], profile: str | None) -> PaperFigures | None:
    """The paper's figures on this axis, if it has them for these settings."""
    from flowspec_edge.bench.results.paper_results import load_paper_results

    if request.published and request.axis == "bandwidth":
        return load_paper_results().bandwidths(profile, settings["stages"], settings["temperature"])
    if request.published and request.axis == "depth":
        return load_paper_results().depths(profile, settings["stages"])
    return None
