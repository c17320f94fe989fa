"""``flowspec bench tables``: the paper's tables from a run, or from files of earlier ones."""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.bench_options import FromOption, Measuring, parse_strategies
from flowspec_edge.cli.options import with_dataclasses
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params

_PAPER = Params(draft="eagle2", pipedec_width=16)  # the FlowSpec paper's comparison, section V-A
_EXAMPLES = """
Examples:

  flowspec bench tables --limit 8 --published

  flowspec bench tables --prompts mt_bench.jsonl --prompts gsm8k.jsonl --json seven.json --out tables.md

  flowspec bench tables --from seven.json --from thirteen.json --published
"""


@with_dataclasses(without=("temperature",), options=Measuring, sampling=Sampling, params=_PAPER)
def tables(
    files: FromOption = None,
    markdown: Annotated[Path | None, typer.Option(
        "--out", help="Write the tables here, not to standard output.", metavar="FILE.md")] = None,
    published: Annotated[bool, typer.Option("--published", help="Add the paper's own means.")] = False,
    *,
    options: Measuring,
    sampling: Sampling,
    params: Params,
) -> None:
    """Print tables I, II and III of the FlowSpec paper in Markdown.

    Runs the methods of these tables that there are, at temperatures 0 and 1, all drafting with
    EAGLE-2 as in the paper; or reads files (--from), and then runs nothing and --strategies says
    which to show.
    """
    from flowspec_edge.bench.markdown import ABLATION, COMPARED, paper_tables
    from flowspec_edge.bench.output import check_writable, write
    from flowspec_edge.bench.published import load_published
    from flowspec_edge.bench.report import load_report
    from flowspec_edge.cli.measuring import fail_if_different, measure
    from flowspec_edge.strategies.registry import STRATEGIES

    if files and options.out:
        raise UsageError("--from reads what was measured; it cannot be combined with --json")
    if markdown is not None:
        check_writable(markdown)
    only = parse_strategies(options.strategies) if options.strategies else None
    if files:
        reports = [load_report(path) for path in files]
    else:
        default = [name for name in STRATEGIES if name in (*COMPARED, *ABLATION)]
        reports = [measure(options, sampling, params, ",".join(default), "0,1")]
    text = paper_tables(reports, only, load_published() if published else None)
    if markdown is not None:
        write(markdown, text)
    else:
        print(text, end="")
    if not files:
        fail_if_different(reports[0])


tables.__doc__ = f"{cleandoc(tables.__doc__ or '')}\n{_EXAMPLES}"
