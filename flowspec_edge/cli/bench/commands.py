"""``flowspec bench``: run, tables, plot, timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.bench import figures
from flowspec_edge.cli.bench.options import (
    EQUAL,
    FLOWSPEC_AND_ABLATIONS,
    PAPER,
    BenchOptions,
    FromOption,
    measured_by_default,
    parse_strategies,
)
from flowspec_edge.cli.common.option_groups import with_dataclasses
from flowspec_edge.cli.common.options import OUTPUT
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)


@with_dataclasses(strategies=measured_by_default(FLOWSPEC_AND_ABLATIONS), rare=("top_k", "top_p"),
                  options=BenchOptions, sampling=Sampling, params=EQUAL)
def run(*, options: BenchOptions, sampling: Sampling, params: Params) -> None:
    """Run strategies on the same prompts and check every token against plain decoding.

    All draft with the model's EAGLE head, and SPD with its module; --set draft=own compares each method with
    the kind of draft model of its paper.

    The file of --json is updated after every strategy and task.

    Examples:

      flowspec bench run --limit 16
      flowspec bench run --strategies chunk_pp,flowspec --temperature 1 --set rank=draft --json out.json
      flowspec bench run --strategies all --set draft=own --limit 8
      flowspec bench run --strategies all --prompts mt_bench.jsonl --prompts gsm8k.jsonl --temperatures 0,1
      --repeats 3 --truncate 1024 --json out.json --resume
      flowspec bench run --prompts spec_bench/question.jsonl --by-category --limit 10
      flowspec bench run --strategies autoregressive,flowspec_plus --clients 4 --limit 8 --json four.json
      flowspec bench run --strategies flowspec_plus --arrival-rate 0.2 --limit 16
    """
    from rich.console import Console

    from flowspec_edge.bench.render.concurrency_table import concurrency_table, rows_to_show
    from flowspec_edge.bench.render.table import show, table, title
    from flowspec_edge.bench.results.report import BenchReport
    from flowspec_edge.cli.bench.measure import Asked, measure
    from flowspec_edge.cli.common.workload import fail_if_different

    report = measure(Asked(FLOWSPEC_AND_ABLATIONS), options, sampling, params)
    assert isinstance(report, BenchReport)
    console = Console()
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        how = title(report.clock, report.profile, report.settings["stages"], temperature)
        show(console, (concurrency_table if report.concurrent else table)(
            rows_to_show(report, temperature), how))
    fail_if_different(report.different_texts())


@with_dataclasses(without=("temperature",), rare=("top_k", "top_p", "jobs", "acceptance"),
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
    from flowspec_edge.bench.render.paper_tables import ABLATION, COMPARED, paper_tables
    from flowspec_edge.bench.results.paper_results import load_paper_results
    from flowspec_edge.bench.results.report import BenchReport, load_report
    from flowspec_edge.cli.bench.measure import Asked, measure
    from flowspec_edge.cli.common.workload import fail_if_different
    from flowspec_edge.strategies.registry import STRATEGIES
    from flowspec_edge.util.files import check_writable, write_output

    if files and options.out:
        raise UsageError("--from only reads files; it cannot be combined with --json")
    if markdown is not None:
        check_writable(markdown)
    only = parse_strategies(options.strategies) if options.strategies else None
    if files:
        reports = [load_report(path) for path in files]
    else:
        default = [name for name in STRATEGIES if name in (*COMPARED, *ABLATION)]
        report = measure(Asked(",".join(default), "0,1"), options, sampling, params)
        assert isinstance(report, BenchReport)
        reports = [report]
    text = paper_tables(reports, only, load_paper_results() if published else None)
    if markdown is not None:
        write_output(markdown, text)
    else:
        print(text, end="")
    if not files:
        fail_if_different(reports[0].different_texts())


app.command("run")(run)
app.command("tables")(tables)
app.command("plot")(figures.plot)
app.command("timeline")(figures.timeline)
