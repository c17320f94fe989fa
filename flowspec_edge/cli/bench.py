"""``flowspec bench``: methods on prompts, as a table and as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from flowspec_edge.cli.clusters import open_cluster
from flowspec_edge.cli.options import (
    ClockOption,
    Dtype,
    DtypeOption,
    JsonOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
    with_dataclasses,
)
from flowspec_edge.config import load_profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.modeldir import DEMO, resolve_model
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)

_ALL = "autoregressive,chunk_pp,pruned_pp,flowspec_no_sbd,flowspec"
_EXAMPLES = """
Examples:

  flowspec bench run --limit 16

  flowspec bench run --strategies chunk_pp,flowspec --temperature 1 --rank draft --json out.json
"""


@app.callback()
def group() -> None:
    """Benchmarks."""


@with_dataclasses(sampling=Sampling, params=Params)
def run(
    strategies: Annotated[str, typer.Option("--strategies", help="Names, separated by commas.")] = _ALL,
    prompts: Annotated[Path | None, typer.Option(
        "--prompts", help="JSONL with prompt or turns; default: the demo's held-out prompts.",
        metavar="F.jsonl")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N prompts.")] = None,
    model: ModelOption = DEMO,
    stages: StagesOption = 4,
    dtype: DtypeOption = "fp32",
    max_new_tokens: MaxNewTokensOption = 128,
    clock: ClockOption = "virtual",
    profile: ProfileOption = "paper-7b",
    out: JsonOption = None,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Run strategies on the same prompts and check every token against plain decoding."""
    from rich.console import Console

    from flowspec_edge.bench.prompts import load_prompts
    from flowspec_edge.bench.runner import Report
    from flowspec_edge.bench.runner import run as run_all
    from flowspec_edge.bench.table import table, title
    from flowspec_edge.cli.measuring import demo_prompts, plain_decoding, progress, requests_for
    from flowspec_edge.text import Tokenizer

    names = _parse_strategies(strategies)
    found = resolve_model(model)
    described = load_profile(profile)  # also when time is real: a wrong name is worth an error
    charged = described if clock == "virtual" else None
    path = prompts or demo_prompts()
    texts = load_prompts(path, limit)
    if out is not None:
        _check_writable(out)
    requests = requests_for(Tokenizer(found), found, texts, max_new_tokens, sampling, params)
    with (open_cluster(clock, found, stages, charged, dtype) as cluster,
          progress(len(requests) * (1 + len(names))) as advance):
        rows, differences = run_all(cluster, plain_decoding(found, dtype), requests, names, advance)

    profile_name = charged.name if charged else None
    Console().print(table(rows, title(clock, profile_name, stages, sampling.temperature)))
    for difference in differences:
        print(f"flowspec: not identical: {difference}", file=sys.stderr)
    if out is not None:
        settings = _settings(found.name, path, len(texts), stages, dtype, max_new_tokens, sampling, params)
        report = Report(profile_name, clock, rows, differences, settings)
        out.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    if differences:
        raise FlowspecError("not every text is that of plain decoding; see above")


run.__doc__ = f"{run.__doc__}\n{_EXAMPLES}"
app.command("run")(run)


def _check_writable(path: Path) -> None:
    """Find out before the work is done, and leave the file as it is."""
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _parse_strategies(text: str) -> list[str]:
    from flowspec_edge.strategies.registry import strategy_class

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError("--strategies names none; see: flowspec strategies")
    return [strategy_class(name).name for name in names]


def _settings(model: str, prompts: Path, count: int, stages: int, dtype: Dtype, max_new_tokens: int,
              sampling: Sampling, params: Params) -> dict[str, Any]:
    """Everything the figures depend on, but for the machine."""
    packages = ("flowspec-edge", "torch", "transformers", "numpy")
    return {
        "model": model, "prompts": prompts.name, "limit": count, "stages": stages, "dtype": dtype,
        "max_new_tokens": max_new_tokens, **asdict(sampling), **asdict(params),
        "versions": {name: version(name) for name in packages},
    }
