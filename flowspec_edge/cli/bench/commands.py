"""``flowspec bench``: run, tables, plot, timeline."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.bench.options import (
    EQUAL,
    FLOWSPEC_AND_ABLATIONS,
    PAPER,
    BenchOptions,
    FromOption,
    measured_by_default,
    parse_strategies,
    require_files,
)
from flowspec_edge.cli.common.option_groups import select_strategy, with_dataclasses
from flowspec_edge.cli.common.options import (
    MOST_REPEATS,
    OUTPUT,
    PROMPTS,
    DeviceOption,
    DtypeOption,
    FigureOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
    StrategyOption,
    parse_counts,
)
from flowspec_edge.cli.common.streams import saved
from flowspec_edge.errors import UsageError
from flowspec_edge.model.opened import DEMO
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)


@with_dataclasses(strategies=measured_by_default(FLOWSPEC_AND_ABLATIONS), rare=("top_k", "top_p", "min_p", "clock"),
                  options=BenchOptions, sampling=Sampling, params=EQUAL)
def run(
    prompt_lengths: Annotated[str | None, typer.Option(
        "--prompt-lengths", help="Also print the time to the first token after prompts of these lengths in "
                                 "tokens, such as 512,4096,32768.", metavar="N,N", show_default=False, hidden=True,
        rich_help_panel=PROMPTS)] = None,
    *,
    options: BenchOptions,
    sampling: Sampling,
    params: Params,
) -> None:
    """Run strategies on the same prompts and check every token against plain decoding.

    All draft with the model's EAGLE head, but for those that cannot; --draft own compares each method with
    the kind of draft model of its paper.

    The file of --json is updated after every strategy and task.

    Examples:

      flowspec bench run --limit 16
      flowspec bench run --strategies chunk_pp,flowspec --temperature 1 --set rank=draft --json out.json
      flowspec bench run --strategies all --draft own --limit 8
      flowspec bench run --strategies all --prompts mt_bench.jsonl --prompts gsm8k.jsonl --temperatures 0,1
      --repeats 3 --truncate 1024 --json out.json --resume
      flowspec bench run --prompts spec_bench/question.jsonl --by-category --limit 10
      flowspec bench run --strategies autoregressive,flowspec_plus --clients 4 --limit 8 --json four.json
      flowspec bench run --strategies flowspec_plus --arrival-rate 0.2 --limit 16
      flowspec bench run --strategies flowspec_plus --limit 1 --prompt-lengths 512,4096,32768
    """
    from rich.console import Console

    from flowspec_edge.cli.bench.measure import MeasureRequest, measure, measure_first_tokens
    from flowspec_edge.cli.common.workload import fail_if_different
    from flowspec_edge.lab.bench.exactness import types_of
    from flowspec_edge.lab.bench.results import BenchReport
    from flowspec_edge.lab.bench.tables import first_token_table, rows_to_show, show, table, timing, title
    from flowspec_edge.util.terminal import counted_stages, printable

    lengths = parse_counts(prompt_lengths, "--prompt-lengths") if prompt_lengths else []
    request = MeasureRequest(FLOWSPEC_AND_ABLATIONS)
    report = measure(request, options, sampling, params)
    assert isinstance(report, BenchReport)
    if lengths:
        report.first_tokens = measure_first_tokens(request, options, params, lengths)
        if options.out is not None:
            saved(options.out, partial(report.save, options.out))
    console = Console()
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        caption = title(report.clock, report.profile, report.settings["stages"], temperature)
        caption = f"{caption}, {types_of(report.settings)}"
        show(console, table(rows_to_show(report, temperature), caption))
    if report.first_tokens:
        caption = f"{timing(report.clock, report.profile)}, {counted_stages(report.settings['stages'])}"
        print(printable(f"\ntime to the first token of a prompt alone, {caption}"))
        show(console, first_token_table(report.first_tokens))
    fail_if_different(report.different_texts())


@with_dataclasses(without=("temperature",), rare=("top_k", "top_p", "min_p", "clients", "acceptance", "clock"),
                  options=BenchOptions, sampling=Sampling, params=PAPER)
def tables(
    files: FromOption = None,
    markdown: Annotated[Path | None, typer.Option(
        "--out", help="Write the tables here, not to standard output.", metavar="FILE.md",
        rich_help_panel=OUTPUT)] = None,
    published: Annotated[bool, typer.Option(
        "--published", help="Add the paper's means.", rich_help_panel=OUTPUT)] = False,
    *,
    options: BenchOptions,
    sampling: Sampling,
    params: Params,
) -> None:
    """Print tables I, II and III of the FlowSpec paper in Markdown.

    Runs the methods of these tables at temperatures 0 and 1, all drafting with EAGLE-2 as in the paper;
    with --from it only reads files, and --strategies selects the rows.  Concurrent requests (--clients,
    --arrival-rate) have another table.

    Examples:

      flowspec bench tables --limit 8 --published
      flowspec bench tables --prompts mt_bench.jsonl --prompts gsm8k.jsonl --json seven.json --out tables.md
      flowspec bench tables --from seven.json --from thirteen.json --published
    """
    from flowspec_edge.cli.bench.measure import MeasureRequest, measure
    from flowspec_edge.cli.common.workload import fail_if_different
    from flowspec_edge.lab.bench.paper_results import load_paper_results
    from flowspec_edge.lab.bench.paper_tables import ABLATION, COMPARED, paper_tables
    from flowspec_edge.lab.bench.results import BenchReport, load_report
    from flowspec_edge.strategies.registry import STRATEGIES
    from flowspec_edge.util.files import check_writable, write_output
    from flowspec_edge.util.terminal import printable

    if files and options.out:
        raise UsageError("--from only reads files; it cannot be combined with --json")
    if markdown is not None:
        check_writable(markdown)
    only = parse_strategies(options.strategies) if options.strategies else None
    if files:
        reports = [load_report(path) for path in files]
    else:
        default = [name for name in STRATEGIES if name in (*COMPARED, *ABLATION)]
        report = measure(MeasureRequest(",".join(default), "0,1"), options, sampling, params)
        assert isinstance(report, BenchReport)
        reports = [report]
    text = paper_tables(reports, only, load_paper_results() if published else None)
    if markdown is None or not saved(markdown, partial(write_output, markdown, text)):
        print(text, end="")
    wrote = [path for path in (options.out, markdown) if path is not None]
    for action, paths in (("read", files or []), ("wrote", wrote)):
        if paths:
            print(printable(f"{action} {', '.join(map(str, paths))}"), file=sys.stderr)
    if not files:
        fail_if_different(reports[0].different_texts())


def compare(
    files: Annotated[list[Path], typer.Argument(
        metavar="A.json B.json", help="Two files that bench run or bench tables wrote with --json.",
        show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not a table.")] = False,
) -> None:
    """Compare two measurements, paired by prompt: B over A, with its spread.

    Pairs are the same method, task, temperature and prompt.  The commits, dates, profiles and types of both
    files are named; other settings that differ are warnings.

    Examples:

      flowspec bench compare before.json after.json
      flowspec bench compare before.json after.json --json
    """
    from flowspec_edge.lab.bench.compare import about_text, comparison_notes, comparison_table
    from flowspec_edge.lab.bench.compare import compare as compared
    from flowspec_edge.lab.bench.results import load_report
    from flowspec_edge.util.terminal import printable

    if len(files) != 2:
        raise UsageError(f"give two files, A.json and B.json, not {len(files)}")
    comparison = compared(files, [load_report(path) for path in files])
    for difference in comparison.differences:
        print(printable(f"flowspec: warning: the files differ in {difference}"), file=sys.stderr)
    if as_json:
        print(json.dumps(comparison.as_json(), indent=1))
        return

    from rich.console import Console

    from flowspec_edge.lab.bench.tables import show

    for name, about in zip("AB", comparison.files, strict=True):
        print(printable(f"{name}: {about_text(about)}"))
    show(Console(highlight=False), comparison_table(comparison))
    for line in comparison_notes(comparison):
        print(printable(line))


def plot(
    files: FromOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="The figure to write.", metavar="F.svg|F.png",
                                             show_default=False)] = None,
) -> None:
    """Draw tokens/s as bars by task or temperature; as lines over stages if these differ between files.

    Examples:

      flowspec bench plot --from out.json --out speed.svg
      flowspec bench plot --from n4.json --from n8.json --from n14.json --out stages.png
    """
    from flowspec_edge.lab.bench.plots import check_figure
    from flowspec_edge.lab.bench.plots import plot as draw
    from flowspec_edge.lab.bench.results import load_report

    paths = require_files(files)
    if out is None:
        raise UsageError("give --out F.svg or F.png: the figure to write")
    check_figure(out)
    draw([load_report(path) for path in paths], out)


@with_dataclasses(strategies=select_strategy, sampling=Sampling, params=Params)
def timeline(
    strategy: StrategyOption = "flowspec",
    prompt: Annotated[str | None, typer.Option(
        "--prompt", help="The text to continue.  Default: a prompt of the demonstration.", metavar="TEXT",
        show_default=False)] = None,
    turns: Annotated[int, typer.Option(
        "--turns", min=1, max=MOST_REPEATS, help="Turns to draw.")] = 12,
    skip_turns: Annotated[int, typer.Option(
        "--skip-turns", min=0, max=MOST_REPEATS, help="Turns between the first token and the drawing.")] = 0,
    model: ModelOption = DEMO,
    stages: StagesOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_new_tokens: MaxNewTokensOption = 128,
    profile: ProfileOption = "paper-7b",
    out: FigureOption = None,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Show when each device is busy: a real run in virtual time, one line per device.

    The timeline starts at the first token; prefill is not shown.  It runs a model: a recording has no times of
    its own, and the demonstration model, the default, needs no download.

    Examples:

      flowspec bench timeline --strategy flowspec
      flowspec bench timeline --strategy chunk_pp --turns 10 --skip-turns 20 --out chunk_pp.svg
      flowspec bench timeline --strategy megatron --turns 40
    """
    from flowspec_edge.boards.planning.testbed import profile_or_testbed
    from flowspec_edge.cli.common.options import device_of, dtype_of, stages_of
    from flowspec_edge.cli.common.workload import demo_prompts, requests_for, require_runnable
    from flowspec_edge.drivers.processes.spec import ClusterSpec
    from flowspec_edge.drivers.virtual.place import Virtual
    from flowspec_edge.lab.bench.plots import check_figure, gantt
    from flowspec_edge.lab.bench.tables import title
    from flowspec_edge.lab.bench.tasks import Prompt, load_prompts
    from flowspec_edge.lab.bench.timeline import draw, window
    from flowspec_edge.model.opened import resolve_model
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.strategies.registry import strategy_class

    strategy_type = strategy_class(strategy)
    open_model, cost_profile = resolve_model(model), profile_or_testbed(profile)
    stages = stages_of(open_model, stages, cost_profile)
    require_runnable([strategy_type.name], open_model, params, "virtual", stages)
    device = device_of(device, open_model, dtype_of(open_model, dtype))
    if out is not None:
        check_figure(out)
    text = Prompt("", "", prompt) if prompt is not None else load_prompts(demo_prompts(), 1)[0]
    [request] = requests_for(Tokenizer(open_model), open_model, [text], max_new_tokens, sampling, params)

    from flowspec_edge.drivers.processes.clusters import open_cluster

    spec = ClusterSpec(open_model.path, stages, dtype_of(open_model, dtype), device=device)
    with open_cluster(spec, Virtual(cost_profile)) as cluster:
        stats = cluster.generate(replace(request, strategy=strategy_type.name)).stats
    view = window(stats.ttft_s, stats.ttft_s + stats.decode_s, stats.slot_s, turns, skip_turns)
    caption = title("virtual", cost_profile.name, stages, sampling.temperature, strategy)
    chart = draw(cluster.spans, stages, view, turns)
    if out is not None:
        gantt(cluster.spans, stages, view, caption, out)
    print(f"{caption}\n{chart}", end="")


for _command in (run, tables, compare, plot, timeline):
    app.command(_command.__name__)(_command)
