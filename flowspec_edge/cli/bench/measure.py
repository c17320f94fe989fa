"""A whole measurement, from its options to a report: checks, requests, resuming, the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowspec_edge.bench.results.report import BenchReport, load_report
from flowspec_edge.bench.run.runner import BenchPlan, Workload
from flowspec_edge.bench.run.tasks import Task, load_tasks
from flowspec_edge.bench.sweeps.sweep import Sweep
from flowspec_edge.cli.bench.options import BenchOptions, parse_strategies, parse_temperatures
from flowspec_edge.cli.common.clusters import choose_clock, open_cluster
from flowspec_edge.cli.common.defaults import device_of, dtype_of, plain_device_of, stages_of
from flowspec_edge.cli.common.workload import (
    demo_prompts,
    near_tie_judge,
    plain_decoding,
    progress,
    requests_for,
    require_runnable,
)
from flowspec_edge.config import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import DEMO, ModelDir, resolve_model
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params

if TYPE_CHECKING:
    from flowspec_edge.bench.run.parallel import ParallelRun

_Results = TypeVar("_Results", BenchReport, Sweep)


def measure(options: BenchOptions, sampling: Sampling, params: Params, strategies: str,
            temperatures: str | None = None, label: str = "bench") -> BenchReport:
    """Run everything and save it to ``options.out`` step by step; all options are checked before that.
    ``label``: before the progress."""
    from flowspec_edge.bench.run.runner import measure as measure_plan
    from flowspec_edge.util.files import check_writable

    names = parse_strategies(options.strategies or strategies)
    model = resolve_model(options.model)
    options = replace(options, stages=stages_of(model, options.stages), dtype=dtype_of(model, options.dtype))
    clock_settings = replace(choose_clock(options.clock, options.profile, options.emulate),
                             right_children=options.right_children)
    options.require_virtual(clock_settings.clock)
    tasks = tasks_of(options)
    temperature_values = parse_temperatures(options.temperatures or temperatures, sampling)
    if options.out is not None:
        check_writable(options.out)
    require_runnable(names, model, params, clock_settings.clock, options.stages)
    processes = clock_settings.processes(options.stages)
    options = replace(options, device=device_of(options.device, model, dtype_of(model, options.dtype),
                                                processes=processes))
    from flowspec_edge.bench.results.host_info import host_info  # numpy, when all options are checked

    report = resume(options, load_report, BenchReport(
        clock_settings.profile_name, clock_settings.clock,
        settings_for(options, tasks, model, clock_settings.profile, sampling, params),
        host_info(options.device), str(date.today())), "clock")
    plan = BenchPlan(names, workloads_for(options, tasks, model, sampling, params), temperature_values,
                     options.repeats, options.warmup, options.pattern)

    def save() -> None:
        if options.out is not None:
            report.save(options.out)

    steps = plan.steps(report)
    report.complete = not steps
    if steps:
        reference = plain_device_of(options.device, model, dtype_of(model, options.dtype), processes)
        if options.parallel:
            assert clock_settings.profile is not None
            run = parallel_run(options, model, names)
            virtual = run.cluster(options.stages, clock_settings.profile)
            measure_plan(virtual, run.plain, plan, deepcopy(report))  # lists the requests
            with run, progress(steps, label) as advance:
                measure_plan(virtual, run.plain, plan, report, advance, save,
                             near_tie_judge(model, options.dtype, reference))
            return report
        with (open_cluster(clock_settings, model, options.stages, options.dtype, device=options.device,
                           idle_s=options.idle_seconds, at_once=plan.at_once) as cluster,
              progress(steps, label) as advance):
            plain, explains = plain_decoding(model, options.dtype, reference)
            measure_plan(cluster, plain, plan, report, advance, save, explains)
    return report


def parallel_run(options: BenchOptions, model: ModelDir, names: Sequence[str]) -> ParallelRun:
    """The processes of --jobs, or Dask's."""
    from flowspec_edge.bench.run.parallel import ParallelRun, Workplace, plugins_of, threads_of

    threads = None if options.dask else threads_of(options.jobs)
    workplace = Workplace(model.path.resolve(), dtype_of(model, options.dtype), options.device,
                          plugins_of(names), threads, options.right_children)
    return ParallelRun(workplace, options.jobs, options.dask)


def tasks_of(options: BenchOptions) -> list[Task]:
    if options.prompts:
        return load_tasks(options.prompts, options.by_category, options.limit)
    tasks = load_tasks([demo_prompts()], options.by_category, options.limit)
    return tasks if options.by_category else [Task(DEMO, tasks[0].prompts)]


def workloads_for(options: BenchOptions, tasks: Sequence[Task], model: ModelDir, sampling: Sampling,
                  params: Params) -> list[Workload]:
    """UsageError for a prompt that does not fit."""
    tokenizer = Tokenizer(model)
    found = []
    for task in tasks:
        try:
            found.append(Workload(task.name, requests_for(
                tokenizer, model, task.prompts, options.max_new_tokens, sampling, params, options.truncate,
                "lower --max-new-tokens, or take the end of long prompts with --truncate N")))
        except UsageError as error:
            raise UsageError(f"task {task.name}: {error}") from error
    return found


def resume(options: BenchOptions, load: Callable[[Path], _Results], new: _Results, *fields: str) -> _Results:
    """The file to resume, else ``new``; UsageError if its settings or ``fields`` differ."""
    if not options.resume or options.out is None or not options.out.exists():
        return new
    try:
        old = load(options.out)
    except UsageError as error:
        raise UsageError(f"cannot resume: {error}; or write to another place") from error
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in fields}
    pairs |= {key: (old.settings.get(key), new.settings.get(key)) for key in old.settings | new.settings}
    if new.clock == "wall":
        pairs["machine"] = old.machine, new.machine
    for key, (before, now) in pairs.items():
        if before != now:
            values = f" ({before} there, {now} here)" if max(len(str(before)), len(str(now))) < 40 else ""
            raise UsageError(f"{options.out} was measured with other settings: {key} differs{values}; "
                             "use the same settings, or write to another place")
    return old


def settings_for(options: BenchOptions, tasks: Sequence[Task], model: ModelDir, profile: Profile | None,
              sampling: Sampling, params: Params) -> dict[str, Any]:
    """Everything that a row depends on, except the machine."""
    from flowspec_edge.bench.results.host_info import commit, versions

    shared = {"clients": options.clients, "arrival_rate": options.arrival_rate}
    drawn = {key: value for key, value in asdict(sampling).items() if key != "temperature"}
    return {
        "model": model.name,
        "tasks": [{"name": t.name, "prompts": len(t.prompts), "sha256": t.digest} for t in tasks],
        "limit": options.limit, "truncate": options.truncate, "stages": options.stages,
        "dtype": options.dtype, "device": options.device, "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats, "warmup": options.warmup,
        **{key: value for key, value in shared.items() if value is not None},
        **drawn, "seeds": [sampling.seed + repeat for repeat in range(options.repeats)],
        **asdict(params), "versions": versions(), "commit": commit(),
        "acceptance": options.right_children, "profile": profile.model_dump() if profile else None,
    }
