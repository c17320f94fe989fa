"""What ``bench``'s commands and ``demo`` share: requests, the reference, a progress bar, a whole run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from flowspec_edge.bench.prompts import Prompt
from flowspec_edge.bench.report import Report, load_report
from flowspec_edge.bench.runner import Explains, Plain, Plan, Workload
from flowspec_edge.bench.tasks import Task, load_tasks
from flowspec_edge.cli.bench_options import Measuring, parse_strategies, parse_temperatures
from flowspec_edge.cli.clusters import Timing, open_cluster, timing
from flowspec_edge.cli.cut import dtype_of, require_whole, stages_of
from flowspec_edge.cli.options import Clock, DtypeChoice
from flowspec_edge.cli.torch_device import device_of, plain_device_of
from flowspec_edge.config import Profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.modeldir import DEMO, DRAFT_PARTS, ModelDir, resolve_model
from flowspec_edge.resources import resource_dir
from flowspec_edge.runtime.request import Request
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.text import Tokenizer


def demo_prompts() -> Path:
    """The held-out prompts that come with the demonstration model."""
    return resource_dir("models") / DEMO / "prompts.jsonl"


def requests_for(tokenizer: Tokenizer, model: ModelDir, prompts: Sequence[Prompt], max_new_tokens: int,
                 sampling: Sampling, params: Params, truncate: int | None = None,
                 advice: str = "lower --max-new-tokens") -> list[Request]:
    """One request a prompt, of its last ``truncate`` tokens; UsageError names a prompt that does not fit."""
    requests = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text)
        ids = ids[-truncate:] if truncate else ids
        name = f"prompt {prompt.id}" if prompt.id else "the prompt"
        require_fitting(len(ids), model, max_new_tokens, name, advice)
        requests.append(Request(ids, max_new_tokens=max_new_tokens, sampling=sampling, params=params,
                                stop_ids=model.stop_ids))
    return requests


def require_fitting(length: int, model: ModelDir, max_new_tokens: int, name: str = "the prompt",
                    advice: str = "lower --max-new-tokens") -> None:
    """UsageError if a prompt of ``length`` tokens and its answer are more than the model takes."""
    if length + max_new_tokens > model.max_positions:
        raise UsageError(f"{name} has {length} tokens and {max_new_tokens} more are asked for, but the model "
                         f"stops at {model.max_positions}; {advice}")


def require_runnable(strategies: Sequence[str], model: ModelDir, params: Params, clock: Clock,
                     stages: int) -> None:
    """UsageError for what no strategy can do without, before torch is imported or any of them runs:
    its draft model, and in processes at least one layer for each stage of a pipeline."""
    from flowspec_edge.strategies.registry import draft_kind, strategy_class

    for name in strategies:
        chosen = strategy_class(name)
        kind = draft_kind(chosen, params, model)
        if kind and kind != "ngram" and not model.draft(kind):
            part = DRAFT_PARTS[kind]
            ways = f"make it with: flowspec models train-spd --model {model.path}; or leave this strategy out"
            if kind != "spd":
                ways = (f"put one there, see --draft for another kind (it has: {_drafts(model)}), look up in "
                        "the text instead with --draft ngram, or do not draft: --strategy autoregressive")
            raise UsageError(f"{name} drafts with {part}/, which {model.path} does not have; {ways}")
        if chosen.parallelism != "pipeline":
            require_whole(model, name)
        if clock == "wall" and chosen.parallelism == "pipeline" and stages > model.layers:
            raise UsageError(f"{name}: {stages} stages are more than the model's {model.layers} layers: "
                             f"use at most --stages {model.layers}, or --clock virtual")


def measure(options: Measuring, sampling: Sampling, params: Params, strategies: str,
            temperatures: str | None = None) -> Report:
    """Everything that is asked, saved to ``options.out`` as it comes; the last two are defaults.

    All that can be found wrong with the request is found before anything runs.
    """
    from flowspec_edge.bench.output import check_writable
    from flowspec_edge.bench.runner import measure as measure_plan

    names = parse_strategies(options.strategies or strategies)
    model = resolve_model(options.model)
    options = settled(options, model)
    when = timing(options.clock, options.profile, options.emulate)
    tasks = asked_tasks(options)
    heat = parse_temperatures(options.temperatures or temperatures, sampling)
    if options.out is not None:
        check_writable(options.out)
    require_runnable(names, model, params, when.clock, options.stages)
    options = on_device(options, model, when.processes(options.stages))
    report = _report(options, when, tasks, model, sampling, params)
    plan = Plan(names, workloads_for(options, tasks, model, sampling, params), heat, options.repeats,
                options.warmup)

    def save() -> None:
        if options.out is not None:
            report.save(options.out)

    if steps := plan.steps(report):
        reference = plain_device_of(options.device, model, dtype_of(model, options.dtype),
                                    when.processes(options.stages))
        with (open_cluster(when, model, options.stages, options.dtype, device=options.device) as cluster,
              progress(steps) as advance):
            plain, explains = plain_decoding(model, options.dtype, reference)
            measure_plan(cluster, plain, plan, report, advance, save, explains)
    return report


def settled(options: Measuring, model: ModelDir) -> Measuring:
    """The options with what a sharded model decides where they leave it open."""
    return replace(options, stages=stages_of(model, options.stages), dtype=dtype_of(model, options.dtype))


def on_device(options: Measuring, model: ModelDir, processes: int) -> Measuring:
    """The options with the torch device on which D0 and the stages compute."""
    device = device_of(options.device, model, dtype_of(model, options.dtype), processes=processes)
    return replace(options, device=device)


def fail_if_different(report: Report) -> None:
    """A text that is not plain decoding's: one line for each on stderr, then an error."""
    for difference in report.differences:
        print(f"flowspec: not identical: {difference}", file=sys.stderr)
    if report.differences:
        raise FlowspecError("not every text is that of plain decoding; see above")


def plain_decoding(model: ModelDir, dtype: DtypeChoice, device: str = "cpu") -> tuple[Plain, Explains | None]:
    """The unsharded model, one token at a time; and in 16 bits what tells whether another text differs
    from its own by nothing but near ties."""
    from flowspec_edge.bench.near_ties import NearTies
    from flowspec_edge.runtime.plain import PlainDecoder

    computed = dtype_of(model, dtype)
    decoder = PlainDecoder(model.path, computed, device)
    explains = None if computed == "fp32" else NearTies(decoder.model).explain
    return lambda r: decoder.generate(list(r.prompt), r.max_new_tokens, r.sampling, r.stop_ids), explains


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr if that is a terminal; call the result before each of ``total`` steps."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        started = 0

        def advance(what: str) -> None:
            nonlocal started
            bar.update(task, description=what, completed=started)
            started += 1

        yield advance


def _drafts(model: ModelDir) -> str:
    return ", ".join(f"{part}/" for kind, part in DRAFT_PARTS.items() if model.draft(kind)) or "none"


def asked_tasks(options: Measuring) -> list[Task]:
    """The tasks of ``--prompts``, or the demonstration model's own."""
    if options.prompts:
        return load_tasks(options.prompts, options.by_category, options.limit)
    tasks = load_tasks([demo_prompts()], options.by_category, options.limit)
    return tasks if options.by_category else [Task(DEMO, tasks[0].prompts)]


def workloads_for(options: Measuring, tasks: Sequence[Task], model: ModelDir, sampling: Sampling,
                  params: Params) -> list[Workload]:
    """A request for every prompt; UsageError names the task and the prompt that does not fit."""
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


def _report(options: Measuring, when: Timing, tasks: Sequence[Task], model: ModelDir,
            sampling: Sampling, params: Params) -> Report:
    """A new report, or the one to go on from."""
    from flowspec_edge.bench.machine import machine

    new = Report(when.profile.name if when.profile else None, when.clock,
                 settings_for(options, tasks, model, when.profile, sampling, params), machine(options.device),
                 str(date.today()))
    if not options.resume or options.out is None or not options.out.exists():
        return new
    try:
        old = load_report(options.out)
    except UsageError as error:
        raise UsageError(f"cannot resume: {error}; or give another --json") from error
    pairs: dict[str, tuple[Any, Any]] = {"clock": (old.clock, new.clock)}
    pairs |= {key: (old.settings.get(key), new.settings.get(key)) for key in old.settings | new.settings}
    if when.clock == "wall":
        pairs["machine"] = old.machine, new.machine
    refuse_other(options.out, pairs)
    old.complete = False
    return old


def refuse_other(path: Path, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    """UsageError if something that a figure depends on is one thing in ``path`` and another here."""
    for key, (before, now) in pairs.items():
        if before != now:
            values = f" ({before} there, {now} here)" if max(len(str(before)), len(str(now))) < 40 else ""
            raise UsageError(f"{path} was measured otherwise: {key} differs{values}; "
                             "measure alike, or give another --json")


def settings_for(options: Measuring, tasks: Sequence[Task], model: ModelDir, profile: Profile | None,
              sampling: Sampling, params: Params) -> dict[str, Any]:
    """Everything a row depends on, but for the machine; which rows there are is not part of it."""
    from flowspec_edge.bench.machine import versions

    drawn = {key: value for key, value in asdict(sampling).items() if key != "temperature"}
    return {
        "model": model.name,
        "tasks": [{"name": t.name, "prompts": len(t.prompts), "sha256": t.digest} for t in tasks],
        "limit": options.limit, "truncate": options.truncate, "stages": options.stages,
        "dtype": options.dtype, "device": options.device, "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats, "warmup": options.warmup,
        **drawn, "seeds": [sampling.seed + repeat for repeat in range(options.repeats)],
        **asdict(params), "versions": versions(), "profile": profile.model_dump() if profile else None,
    }
