"""A whole measurement, from its options to its results: checks, requests, resuming, the run.

All options are checked before anything runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowspec_edge.boards.planning.testbed import profile_or_testbed
from flowspec_edge.cli.bench.clusters import ClusterSetup, open_points, parallel_points
from flowspec_edge.cli.bench.options import BenchOptions, parse_strategies, parse_temperatures
from flowspec_edge.cli.bench.subject import BenchSubject, ModelSubject, subject_of
from flowspec_edge.cli.common.clusters import ClockSettings, choose_clock
from flowspec_edge.cli.common.progress import progress
from flowspec_edge.cli.common.streams import saved
from flowspec_edge.device_profile import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.axes import Axis, Value
from flowspec_edge.lab.bench.results import BenchReport, Links, Results, Sweep, load_report, load_sweep
from flowspec_edge.lab.bench.runner import BenchPlan, Plans, measure_points, steps
from flowspec_edge.lab.bench.tasks import Task
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.util.files import check_writable

if TYPE_CHECKING:
    from flowspec_edge.lab.first_token import FirstToken

_Results = TypeVar("_Results", BenchReport, Sweep)


@dataclass(frozen=True)
class MeasureRequest:
    """What a command measures, beside its options.

    strategies    without --strategies
    temperatures  without --temperatures, separated by commas; None: that of ``Sampling``
    axis, values  of a sweep, in the order of measurement
    links         of a sweep: namespaces emulate the profile, a cluster's boards take their own time
    label         before the progress
    """

    strategies: str
    temperatures: str | None = None
    axis: Axis | None = None
    values: Sequence[Value] = ()
    links: Links = "virtual"
    published: bool = True
    cluster: Path | None = None
    board_model: str | None = None
    label: str = "bench"

    def clock(self, options: BenchOptions) -> ClockSettings:
        if self.links == "virtual":
            settings = choose_clock(options.clock, options.profile, options.emulate)
            return replace(settings, right_children=options.right_children)
        profile = profile_or_testbed(options.profile)  # a wrong name is an error for boards, too
        return ClockSettings("wall", profile if self.links == "namespaces" else None)

    def points(self, params: Params, stages: int) -> list[tuple[Params, int]]:
        """Return parameters and stages at each value; raise UsageError for invalid parameters."""
        if self.axis is None:
            return [(params, stages)]
        return [(self.axis.params(params, value), self.axis.stages(stages, value)) for value in self.values]


def measure(request: MeasureRequest, options: BenchOptions, sampling: Sampling, params: Params,
            figure: Path | None = None) -> Results:
    """Run everything and save it to ``options.out`` step by step.

    Return a Sweep along ``request.axis``, or a BenchReport without an axis.
    """
    names = parse_strategies(request.strategies if options.strategies is None else options.strategies)
    is_all = options.strategies is not None and options.strategies.strip() == "all"
    subject = subject_of(options)
    clock = request.clock(options)
    profile = None if request.axis and request.axis.name == "stages" else clock.profile
    dtype = subject.dtype(options.dtype)
    options = replace(options, stages=subject.stages(options.stages, profile), dtype=dtype)
    options.require_virtual(clock.clock)
    tasks = subject.tasks(options)
    temperatures = parse_temperatures(request.temperatures if options.temperatures is None else options.temperatures,
                                      sampling)
    subject.require_temperatures(temperatures)
    if options.out is not None:
        check_writable(options.out)
    if figure is not None:
        from flowspec_edge.lab.bench.plots import check_figure

        check_figure(figure)
    inventory, processes = None, 1
    if request.cluster is not None:
        from flowspec_edge.boards.inventory import load_inventory

        if options.device != "auto":
            raise UsageError("give --cluster or --device, not both: the cluster file says torch_device")
        inventory = load_inventory(request.cluster)
        options = replace(options, stages=len(inventory.verify), device="cpu")
    omissions: list[str] = []  # for each strategy that "all" names and that cannot run here, the reason
    if clock.clock == "wall" and (options.strategies is None or is_all):
        from flowspec_edge.strategies.registry import groups

        if virtual := groups(names):
            omissions.append(f"{' and '.join(virtual)} exist in virtual time only, and are left out")
            names = [name for name in names if name not in virtual]
    if dict(params.specific).get("plus_carry") is None:
        params = params.changed(plus_carry=False)  # a prompt's figures must not depend on the prompts before it
    points = request.points(params, options.stages)
    for at_value, stages in points:
        if clock.profile is not None:
            clock.profile.check_stages(stages)
        for name in list(names):
            try:
                subject.require([name], at_value, clock.clock, stages)
            except UsageError as error:
                if not is_all or len(names) == 1:
                    raise
                names.remove(name)
                omissions.append(f"{name} is left out: {error}")
    if inventory is None:
        processes = clock.processes(max(stages for _, stages in points))
        options = replace(options, device=subject.device(options.device, dtype, processes))
    settings = settings_for(options, tasks, subject, clock.profile, sampling, params)
    if request.axis is not None:
        settings["temperature"] = sampling.temperature
    if inventory is not None:  # D0's first
        settings["device"] = [inventory.torch_device(board) for board in (inventory.draft, *inventory.verify)]
    results = _results(request, options, clock, settings)
    plan = BenchPlan(names, subject.workloads(options, tasks, sampling, params), temperatures,
                     options.repeats, options.warmup, options.pattern)
    plans: Plans = {None: plan} if request.axis is None else {
        value: plan.at(request.axis, value) for value in request.values}

    def save() -> None:
        if options.out is not None:
            saved(options.out, partial(results.save, options.out))

    for why in omissions:
        print(f"flowspec: note: {why}", file=sys.stderr)
    total = steps(results, plans)
    results.complete = results.complete or not total
    if not total:
        return results
    setup = ClusterSetup(request.axis, subject, options, clock, plan.at_once, inventory,
                         request.board_model or str(subject.path.resolve()))
    if options.parallel:
        run, open_point = parallel_points(setup, names)
        plain, explains = ((run.plain, subject.judge(options, processes)) if isinstance(subject, ModelSubject) else
                           subject.plain(options, processes))
        measure_points(deepcopy(results), plans, open_point, plain)  # lists the requests
        with run, progress(total, request.label) as advance:
            measure_points(results, plans, open_point, plain, advance, save, explains)
        return results
    with open_points(request.links, setup) as open_point, progress(total, request.label) as advance:
        plain, explains = subject.plain(options if inventory is None else replace(options, device="cpu"), processes)
        measure_points(results, plans, open_point, plain, advance, save, explains)
    return results


def measure_first_tokens(request: MeasureRequest, options: BenchOptions, params: Params, lengths: Sequence[int]
                         ) -> list[FirstToken]:
    """Measure the time to the first token after prompts of these lengths.

    The clock and the devices are those of :func:`measure`.
    """
    from flowspec_edge.drivers.virtual.devices import Devices
    from flowspec_edge.lab.first_token import in_virtual_time, measured

    subject, clock = subject_of(options), request.clock(options)
    stages = subject.stages(options.stages, clock.profile)
    if clock.clock == "virtual":
        assert clock.profile is not None
        devices = Devices.from_profile(clock.profile, stages)
        return [in_virtual_time(devices, tokens, params) for tokens in lengths]
    dtype = subject.dtype(options.dtype)
    options = replace(options, stages=stages, dtype=dtype,
                      device=subject.device(options.device, dtype, clock.processes(stages)))
    with open_points(request.links, ClusterSetup(None, subject, options, clock)) as open_point, open_point(None) as at:
        return measured(at.cluster.generate, lengths, params)


def _results(request: MeasureRequest, options: BenchOptions, clock: ClockSettings, settings: dict[str, Any]
             ) -> Results:
    """Return empty results, or those of the file to resume."""
    from flowspec_edge.lab.bench.host_info import host_info  # numpy, when all options are checked
    from flowspec_edge.lab.bench.paper_results import load_paper_results

    shared = clock.profile_name, clock.clock, settings, host_info(options.device), str(date.today())
    if request.axis is None:
        return _resume(options, load_report, BenchReport(*shared))
    new = Sweep(*shared, axis=request.axis, links=request.links)
    new.settings = {key: value for key, value in settings.items() if key not in request.axis.replaces}
    sweep = _resume(options, load_sweep, new)
    sweep.published = None  # a resumed file's may differ from what is asked for now
    if request.published:
        sweep.published = request.axis.published(load_paper_results(), clock.profile_name, settings["stages"],
                                                 settings["temperature"])
    return sweep


def _resume(options: BenchOptions, load: Callable[[Path], _Results], new: _Results) -> _Results:
    """Return the results of the file to resume, else ``new``; raise UsageError if it was measured in another way."""
    if not options.resume or options.out is None or not options.out.exists():
        return new
    try:
        old = load(options.out)
    except UsageError as error:
        raise UsageError(f"cannot resume: {error}; or write to another place") from error
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in ("axis", "links", "clock")
             if hasattr(new, name)}
    pairs |= {key: (old.settings.get(key), new.settings.get(key)) for key in old.settings | new.settings}
    if new.clock == "wall":
        pairs["machine"] = old.machine, new.machine
    for key, (before, now) in pairs.items():
        if before != now:
            values = f" ({before} there, {now} here)" if max(len(str(before)), len(str(now))) < 40 else ""
            raise UsageError(f"{options.out} was measured with other settings: {key} differs{values}; "
                             "use the same settings, or write to another place")
    return old


def settings_for(options: BenchOptions, tasks: Sequence[Task], subject: BenchSubject, profile: Profile | None,
                 sampling: Sampling, params: Params) -> dict[str, Any]:
    """Return everything that a row depends on, except the machine."""
    from flowspec_edge.lab.bench.host_info import commit, versions

    shared = {"clients": options.clients, "arrival_rate": options.arrival_rate, "chat": options.chat or None}
    sampling_settings = {key: value for key, value in asdict(sampling).items() if key != "temperature"}
    return {
        "model": subject.name,
        "tasks": [{"name": t.name, "prompts": len(t.prompts), "sha256": t.digest, "each": t.digests}
                  for t in tasks],
        "limit": options.limit, "truncate": options.truncate, "stages": options.stages,
        "dtype": options.dtype, "weights": subject.weights(subject.dtype(options.dtype)),
        "device": options.device, "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats, "warmup": options.warmup,
        **{key: value for key, value in shared.items() if value is not None},
        **({"recording": subject.recording.provenance} if subject.recording else {}),
        **sampling_settings, "seeds": [sampling.seed + repeat for repeat in range(options.repeats)],
        **params.flat(), "versions": versions(), "commit": commit(),
        "acceptance": options.right_children, "profile": profile.model_dump() if profile else None,
    }
