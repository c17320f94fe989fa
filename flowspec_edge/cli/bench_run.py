"""``flowspec bench run``: strategies on tasks, as a table and as JSON."""

from __future__ import annotations

from inspect import cleandoc

from flowspec_edge.cli.bench_options import FLOWSPEC_AND_ABLATIONS, Measuring
from flowspec_edge.cli.options import with_dataclasses
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params

_EXAMPLES = """
Examples:

  flowspec bench run --limit 16

  flowspec bench run --strategies chunk_pp,flowspec --temperature 1 --rank draft --json out.json

  flowspec bench run --strategies all --prompts mt_bench.jsonl --prompts gsm8k.jsonl --temperatures 0,1
  --repeats 3 --truncate 1024 --json out.json --resume

  flowspec bench run --prompts spec_bench/question.jsonl --by-category --limit 10
"""


@with_dataclasses(options=Measuring, sampling=Sampling, params=Params)
def run(*, options: Measuring, sampling: Sampling, params: Params) -> None:
    """Run strategies on the same prompts and check every token against plain decoding.

    The file of --json is written whenever a strategy is through with a task.
    """
    from rich.console import Console

    from flowspec_edge.bench.table import show, table, title
    from flowspec_edge.cli.measuring import fail_if_different, measure

    report = measure(options, sampling, params, FLOWSPEC_AND_ABLATIONS)
    console = Console()
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        rows = [row for row in report.rows if row.temperature == temperature]
        if len({row.task for row in rows}) > 1:
            rows += [row for row in report.means if row.temperature == temperature]
        how = title(report.clock, report.profile, report.settings["stages"], temperature)
        show(console, table(rows, how))
    fail_if_different(report)


run.__doc__ = f"{cleandoc(run.__doc__ or '')}\n{_EXAMPLES}"
