"""The options by which benches measure, and what their texts mean.

Knows names, defaults and what is wrong with a list.  Does not measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.options import (
    ClockOption,
    DeviceOption,
    DtypeOption,
    EmulateOption,
    JsonOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import DEMO
from flowspec_edge.sampling import Sampling

FLOWSPEC_AND_ABLATIONS = "autoregressive,chunk_pp,pruned_pp,flowspec_no_sbd,flowspec"

FromOption = Annotated[list[Path] | None, typer.Option(
    "--from", help="A file that bench run or bench tables wrote with --json; may be given several times.",
    metavar="OUT.json")]
StrategiesOption = Annotated[str | None, typer.Option(
    "--strategies", help="Names, separated by commas, or all.", show_default=False)]


@dataclass(frozen=True)
class Measuring:
    """What to measure and how often; the fields are options of their own names."""

    strategies: StrategiesOption = None
    prompts: Annotated[list[Path] | None, typer.Option(
        "--prompts", help="JSONL with prompt or turns (FlowSpec's, EAGLE's and Spec-Bench's question.jsonl "
                          "too); each file is a task.  Default: the demo's held-out prompts.",
        metavar="F.jsonl", show_default=False)] = None
    by_category: Annotated[bool, typer.Option(
        "--by-category", help="Each category in the files is a task; MT-bench's eight are one, as in "
                              "Spec-Bench.")] = False
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only a task's first N prompts.")] = None
    truncate: Annotated[int | None, typer.Option(
        "--truncate", min=1, help="Of a longer prompt take the last N tokens.", metavar="N")] = None
    temperatures: Annotated[str | None, typer.Option(
        "--temperatures", help="Several, separated by commas, in place of --temperature.",
        metavar="T,T", show_default=False)] = None
    repeats: Annotated[int, typer.Option(
        "--repeats", min=1, help="Run everything R times, with seeds one apart; reports the standard "
                                 "deviation.  Greedy text in virtual time is run once.", metavar="R")] = 1
    warmup: Annotated[int, typer.Option(
        "--warmup", min=0, help="Requests a strategy before measuring; they do not count.", metavar="W")] = 0
    model: ModelOption = DEMO
    stages: StagesOption = 0
    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    max_new_tokens: MaxNewTokensOption = 128
    clock: ClockOption = "virtual"
    profile: ProfileOption = "paper-7b"
    emulate: EmulateOption = None
    out: JsonOption = None
    resume: Annotated[bool, typer.Option(
        "--resume", help="Keep what is in --json's file and measure what it lacks.")] = False

    def __post_init__(self) -> None:
        if self.resume and self.out is None:
            raise UsageError("--resume needs --json OUT: the file to go on from")


def parse_strategies(text: str) -> list[str]:
    """Names of registered strategies, each once; a UsageError lists the known ones."""
    from flowspec_edge.strategies.registry import STRATEGIES, strategy_class

    if text.strip() == "all":
        return list(STRATEGIES)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError("--strategies names none; see: flowspec strategies")
    return [strategy_class(name).name for name in names]


def parse_temperatures(text: str | None, sampling: Sampling) -> list[float]:
    """``--temperatures``, or the one of ``--temperature``."""
    if text is None:
        return [sampling.temperature]
    if sampling.temperature:
        raise UsageError("give --temperature or --temperatures, not both")
    try:
        given = list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"--temperatures must be numbers separated by commas, not {text!r}") from None
    return [Sampling(temperature).temperature for temperature in given]  # a UsageError if out of range


def require_files(paths: Sequence[Path] | None) -> list[Path]:
    """``--from``, at least once."""
    if not paths:
        raise UsageError("give --from OUT.json: a file that flowspec bench run wrote with --json")
    return list(paths)
