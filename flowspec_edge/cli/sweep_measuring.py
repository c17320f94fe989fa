"""From a sweep's options to what it showed: numbers, checks, resuming, the run, and its output.

Everything that can be found wrong with a request is found before anything runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from flowspec_edge.bench.runner import Plan
from flowspec_edge.bench.sweep import UNITS, Axis, Clock, Figures, Links, Sweep, Value, label, load_sweep
from flowspec_edge.bench.sweep_runner import measure_sweep, params_at, plan_at, stages_at, steps
from flowspec_edge.cli.bench_options import Measuring, parse_strategies
from flowspec_edge.cli.cut import dtype_of
from flowspec_edge.cli.measuring import (
    asked_tasks,
    on_device,
    plain_decoding,
    progress,
    refuse_other,
    require_runnable,
    settings_for,
    settled,
    workloads_for,
)
from flowspec_edge.cli.torch_device import plain_device_of
from flowspec_edge.config import load_profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.modeldir import resolve_model
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params

_SET: dict[Axis, tuple[str, ...]] = {"bandwidth": (), "latency": (), "stages": ("stages",),
                                     "segment": ("segment",), "depth": ("depth", "expand_depth")}


@dataclass(frozen=True)
class Asked:
    """An axis, its values in the order in which they are measured, and how a cluster takes them on."""

    axis: Axis
    values: Sequence[Value]
    strategies: str  # when --strategies names none
    links: Links = "virtual"
    emulated: bool = False
    published: bool = True
    cluster: Path | None = None
    board_model: str | None = None

    @property
    def clock(self) -> Clock:
        return "virtual" if self.links == "virtual" else "wall"


def parse_numbers(text: str, option: str, zero: bool = False) -> list[Value]:
    """Numbers separated by commas, each once; ``zero`` may be one of them."""
    kind = "numbers of at least 0" if zero else "positive numbers"
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= n < float("inf") and (n or zero) for n in found):
        raise UsageError(f"{option} must be {kind} separated by commas, not {text!r}")
    return _each_once([int(n) if n.is_integer() else n for n in found], option)


def parse_counts(text: str, option: str) -> list[int]:
    """Whole numbers from 1 separated by commas, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(f"{option} must be whole numbers from 1, separated by commas, not {text!r}")
    found = [int(part) for part in parts]
    _each_once(found, option)
    return found


def _each_once(values: Sequence[Value], option: str) -> list[Value]:
    twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if twice is not None:
        raise UsageError(f"{option} names {label(twice)} twice")
    return list(values)


def run_sweep(asked: Asked, options: Measuring, sampling: Sampling, params: Params,
              figure: Path | None) -> None:
    """Measure, save, print and draw; an error at the end if a text is not plain decoding's."""
    from rich.console import Console

    from flowspec_edge.bench.sweep_figures import plot_sweep
    from flowspec_edge.bench.sweep_table import notes, tables
    from flowspec_edge.bench.table import show

    sweep = measured(asked, options, sampling, params, figure)
    console = Console()
    say = partial(console.print, soft_wrap=True, highlight=False, markup=False)
    for caption, made in tables(sweep):
        say(caption)
        show(console, made)
    for line in notes(sweep):
        say(line)
    if figure is not None:
        plot_sweep(sweep, figure)
    _fail_if_different(sweep)


def measured(asked: Asked, options: Measuring, sampling: Sampling, params: Params,
             figure: Path | None = None) -> Sweep:
    """Everything that is asked, saved to ``options.out`` as it comes."""
    from flowspec_edge.bench.figures import check_figure
    from flowspec_edge.bench.output import check_writable
    from flowspec_edge.cli.sweep_links import Setup, open_points

    names = parse_strategies(options.strategies or asked.strategies)
    model, profile = resolve_model(options.model), load_profile(options.profile)
    options = settled(options, model)
    tasks = asked_tasks(options)
    if options.out is not None:
        check_writable(options.out)
    if figure is not None:
        check_figure(figure)
    inventory, reference = None, "cpu"
    if asked.cluster is not None:
        from flowspec_edge.fleet.inventory import load_inventory

        if options.device != "auto":
            raise UsageError("give --cluster or --device, not both: the cluster file says torch_device")
        inventory = load_inventory(asked.cluster)
        options = replace(options, stages=len(inventory.verify), device="cpu")
    for value in asked.values:
        require_runnable(names, model, params_at(params, asked.axis, value), asked.clock,
                         stages_at(options.stages, asked.axis, value))
    if inventory is None:
        most = max(stages_at(options.stages, asked.axis, value) for value in asked.values)
        processes = most + 1 if asked.clock == "wall" else 1
        options = on_device(options, model, processes)
        reference = plain_device_of(options.device, model, dtype_of(model, options.dtype), processes)
    charged = profile if asked.clock == "virtual" or asked.emulated else None
    settings: dict[str, Any] = {**settings_for(options, tasks, model, charged, sampling, params),
                                "temperature": sampling.temperature}
    if inventory is not None:  # D0's first
        boards = (inventory.draft, *inventory.verify)
        settings["device"] = [inventory.torch_device(board) for board in boards]
    settings = {key: value for key, value in settings.items() if key not in _SET[asked.axis]}
    sweep = _sweep(asked, options, settings, charged.name if charged else None)
    plan = Plan(names, workloads_for(options, tasks, model, sampling, params), [sampling.temperature],
                options.repeats, options.warmup)
    plans = {value: plan_at(plan, asked.axis, value) for value in asked.values}

    def save() -> None:
        if options.out is not None:
            sweep.save(options.out)

    if total := steps(sweep, plans):
        setup = Setup(asked.axis, model, options.stages, profile, options.dtype, inventory,
                      asked.board_model or str(model.path.resolve()), options.device)
        with open_points(asked.links, setup) as open_point, progress(total) as advance:
            plain, explains = plain_decoding(model, options.dtype, reference)
            measure_sweep(sweep, plans, open_point, plain, advance, save, explains)
    return sweep


def _sweep(asked: Asked, options: Measuring, settings: dict[str, Any], profile: str | None) -> Sweep:
    """A new sweep, or the one to go on from."""
    from flowspec_edge.bench.machine import machine

    new = Sweep(asked.axis, asked.links, asked.emulated, profile, asked.clock, settings,
                machine(options.device), str(date.today()), published=_published(asked, settings, profile))
    if not options.resume or options.out is None or not options.out.exists():
        return new
    try:
        old = load_sweep(options.out)
    except UsageError as error:
        raise UsageError(f"cannot resume: {error}; or give another --json") from error
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(old, name), getattr(new, name)) for name in ("axis", "links", "emulated")}
    pairs |= {key: (old.settings.get(key), settings.get(key)) for key in old.settings | settings}
    if asked.clock == "wall":
        pairs["machine"] = old.machine, new.machine
    refuse_other(options.out, pairs)
    old.published = new.published
    return old


def _published(asked: Asked, settings: dict[str, Any], profile: str | None) -> Figures | None:
    """The paper's figures on this axis, if it is about this testbed."""
    from flowspec_edge.bench.published import load_published

    if asked.published and asked.axis == "bandwidth":
        return load_published().bandwidths(profile, settings["stages"], settings["temperature"])
    if asked.published and asked.axis == "depth":
        return load_published().depths(profile, settings["stages"])
    return None


def _fail_if_different(sweep: Sweep) -> None:
    """A text that is not plain decoding's: one line for each on stderr, then an error."""
    different = sweep.differences()
    for value, difference in different:
        print(f"flowspec: not identical: at {label(value, UNITS[sweep.axis])}: {difference}", file=sys.stderr)
    if different:
        raise FlowspecError("not every text is that of plain decoding; see above")
