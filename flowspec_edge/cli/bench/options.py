"""The options of benchmarks and sweeps, and their parsing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.option_groups import StrategySelector
from flowspec_edge.cli.common.options import (
    MODEL,
    MOST_REPEATS,
    MOST_TOKENS,
    OUTPUT,
    PROMPTS,
    SAMPLING,
    STRATEGY,
    TIME,
    ClockOption,
    DeviceOption,
    DtypeOption,
    EmulateOption,
    JsonOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
    not_nan,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import EAGLE2
from flowspec_edge.model.opened import DEMO
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.util.threads import cores

if TYPE_CHECKING:
    from flowspec_edge.lab.bench.runner import ArrivalPattern

# The same head for all, or what stands in for a missing one, and no look-up in the text.
EQUAL = partial(Params, draft=EAGLE2.name, ngram=False)
# The FlowSpec paper's comparison, section V-A.
PAPER = partial(EQUAL, pipedec_width=16)
# Of right children that are not ranked first. With it FlowSpec makes the paper's 8.7 tokens a round (Table
# II) with the demonstration model: docs/explained/acceptance.md.
PUBLISHED_SHARE = 0.65
FLOWSPEC_AND_ABLATIONS = "autoregressive,chunk_pp,pruned_pp,flowspec_no_sbd,flowspec,flowspec_plus"

AcceptanceOption = Annotated[str, typer.Option(
    "--acceptance", metavar="head|paper|SHARE", rich_help_panel=TIME,
    help="How often guesses are right, in virtual time; no text changes.  head: as the draft model's are.  SHARE from "
         "0 to 1: a right guess that is not the first is kept with this probability.  From 1 to 2: the right token "
         "is also put first at SHARE - 1 of the positions.  paper: 0.65, which gives the demonstration model the "
         "FlowSpec paper's tokens a round.")]
FromOption = Annotated[list[Path] | None, typer.Option(
    "--from", help="A file that bench run or bench tables wrote with --json; may be given several times.",
    metavar="OUT.json")]
StrategiesOption = Annotated[str | None, typer.Option(
    "--strategies", help="Names of flowspec strategies, separated by commas; all: those that the model can draft.",
    metavar="NAME,NAME", show_default=False, rich_help_panel=STRATEGY)]


@dataclass(frozen=True)
class BenchOptions:
    """The options of a measurement; every field is a command-line option."""

    strategies: StrategiesOption = None
    prompts: Annotated[list[Path] | None, typer.Option(
        "--prompts", help="A JSONL file whose lines have prompt or turns, like question.jsonl of FlowSpec, EAGLE "
                          "and Spec-Bench.  Each file is a task.  Default: the demonstration's held-out prompts.",
        metavar="F.jsonl", show_default=False, rich_help_panel=PROMPTS)] = None
    by_category: Annotated[bool, typer.Option(
        "--by-category", help="Each category of the files is a task; MT-bench's eight are one, as in "
                              "Spec-Bench.",
        hidden=True, rich_help_panel=PROMPTS)] = False
    chat: Annotated[bool, typer.Option(
        "--chat", help="The prompts are questions: apply the model's chat template.  Default of --prompts: 24 "
                       "questions of six kinds that come with smollm2-135m.", rich_help_panel=PROMPTS)] = False
    limit: Annotated[int | None, typer.Option(
        "--limit", min=1, max=MOST_REPEATS, help="Maximum prompts of a task: its first N.  Default: all.", metavar="N",
        rich_help_panel=PROMPTS)] = None
    truncate: Annotated[int | None, typer.Option(
        "--truncate", min=1, max=MOST_TOKENS, metavar="N", hidden=True, rich_help_panel=PROMPTS,
        help="Maximum tokens of a prompt: its last N.  Default: all.")] = None
    temperatures: Annotated[str | None, typer.Option(
        "--temperatures", help="Several temperatures, separated by commas, instead of --temperature.",
        metavar="T,T", show_default=False, rich_help_panel=SAMPLING)] = None
    repeats: Annotated[int, typer.Option(
        "--repeats", min=1, max=MOST_REPEATS,
        help="Run everything R times, with seeds one apart, and report the standard "
                                 "deviation.  Greedy text in virtual time runs once.", metavar="R",
        hidden=True, rich_help_panel=SAMPLING)] = 1
    warmup: Annotated[int, typer.Option(
        "--warmup", min=0, max=MOST_REPEATS, help="Requests of a strategy before its first measured one.", metavar="W",
        hidden=True, rich_help_panel=TIME)] = 0
    clients: Annotated[int | None, typer.Option(
        "--clients", min=1, max=64, metavar="K", show_default=False, rich_help_panel=PROMPTS,
        help="Requests run in groups of K that arrive together, and each alone to compare.")] = None
    arrival_rate: Annotated[float | None, typer.Option(
        "--arrival-rate", min=0.001, max=1000, callback=not_nan, metavar="R", show_default=False,
        hidden=True, rich_help_panel=PROMPTS,
        help="Let requests arrive at random times, R a second on average (a Poisson process, seeded by --seed).  "
             "They do not wait for earlier answers.")] = None
    idle_seconds: Annotated[float, typer.Option(
        "--idle-seconds", min=0, max=3600, callback=not_nan,
        help="Seconds of idling before the first request, on boards that measure power; idle power is measured after "
             "the first second.", metavar="S", hidden=True, rich_help_panel=TIME)] = 5.0
    model: ModelOption = DEMO
    recording: Annotated[Path | None, typer.Option(
        "--recording", help="What a model said (flowspec record), in place of --model: virtual time needs no tensors "
                            "and answers in seconds.", metavar="FILE", show_default=False,
        rich_help_panel=MODEL)] = None
    stages: StagesOption = 0
    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    max_new_tokens: MaxNewTokensOption = 128
    clock: ClockOption = "virtual"
    profile: ProfileOption = "paper-7b"
    emulate: EmulateOption = None
    acceptance: AcceptanceOption = "head"
    out: JsonOption = None
    resume: Annotated[bool, typer.Option(
        "--resume", help="Keep the figures in --json's file and measure the missing ones.",
        rich_help_panel=OUTPUT)] = False

    jobs: Annotated[int | None, typer.Option(
        "--jobs", min=1, max=1024, help="Processes for requests in virtual time; figures are those of one.  Default: "
                                        "1, or with --recording one for each core.",
        metavar="N", hidden=True, show_default=False, rich_help_panel=TIME)] = None
    dask: Annotated[str | None, typer.Option(
        "--dask", help="Let the workers of this Dask scheduler compute, such as tcp://10.0.0.9:8786.",
        metavar="ADDRESS", show_default=False, hidden=True, rich_help_panel=TIME)] = None

    @property
    def pattern(self) -> ArrivalPattern | None:
        from flowspec_edge.lab.bench.runner import ArrivalPattern

        if self.clients is None and self.arrival_rate is None:
            return None
        return ArrivalPattern(self.clients, self.arrival_rate)

    @property
    def processes(self) -> int:
        """For requests in virtual time: recordings need little memory, so each core may have one."""
        if self.jobs is not None:
            return self.jobs
        return cores() if self.recording is not None and find_spec("joblib") else 1

    @property
    def parallel(self) -> bool:
        return self.processes > 1 or self.dask is not None

    @property
    def right_children(self) -> float:
        """Raise UsageError for what is neither a word nor a share."""
        return parse_acceptance(self.acceptance)

    def require_recorded(self) -> None:
        """Raise UsageError for options that need a model with weights."""
        conflicts = {"--model": self.model != DEMO, "--prompts": self.prompts, "--chat": self.chat,
                     "--truncate": self.truncate, "--clock wall": self.clock == "wall", "--emulate": self.emulate,
                     "--device": self.device != "auto", "--dtype": self.dtype != "auto",
                     "--dask": self.dask, "--repeats": self.repeats > 1}
        if conflicting := [option for option, value in conflicts.items() if value]:
            raise UsageError("--recording has its own model, prompts and texts, in virtual time: "
                             f"leave {conflicting[0]} out")

    def require_virtual(self, clock: str) -> None:
        if self.right_children != 1 and clock != "virtual":
            raise UsageError("--acceptance is for virtual time: processes draft with what the head gives")
        if self.parallel and clock != "virtual":
            raise UsageError("--jobs and --dask compute in virtual time only: in real time, requests would "
                             "take the cores from one another")

    def __post_init__(self) -> None:
        if self.chat and self.truncate is not None:
            raise UsageError("give --chat or --truncate, not both: the template's beginning would be cut off")
        if self.resume and self.out is None:
            raise UsageError("--resume needs --json OUT: the file to resume")
        if self.clients is not None and self.arrival_rate is not None:
            raise UsageError("give --clients or --arrival-rate, not both: requests arrive in groups or at a "
                             "rate")


def parse_acceptance(text: str) -> float:
    """Read ``--acceptance`` as ``CalibratedDrafter``'s share; raise UsageError for anything else."""
    if text in (words := {"head": 1.0, "paper": PUBLISHED_SHARE}):
        return words[text]
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 2:
        raise UsageError(f"--acceptance must be head, paper or a number from 0 to 2, not {text!r}")
    return share


def measured_by_default(names: str) -> StrategySelector:
    """Return, for ``with_dataclasses``, the strategies of ``--strategies``, else ``names``."""
    return lambda arguments: parse_strategies(
        names if arguments["options"].strategies is None else arguments["options"].strategies)


def parse_strategies(text: str) -> list[str]:
    """Return the names without duplicates; errors are those of ``strategy_class``."""
    from flowspec_edge.strategies.registry import require_strategy, strategy_class, strategy_names

    if text.strip() == "all":
        return strategy_names()
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError("--strategies has no name; see: flowspec strategies")
    for name in names:
        require_strategy(name)
    return [strategy_class(name).name if ":" in name else name for name in names]


def parse_temperatures(text: str | None, sampling: Sampling) -> list[float]:
    if text is None:
        return [sampling.temperature]
    if sampling.temperature:
        raise UsageError("give --temperature or --temperatures, not both")
    try:
        temperatures = list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"--temperatures must be numbers separated by commas, not {text!r}") from None
    return [Sampling(temperature).temperature for temperature in temperatures]  # a UsageError if out of range


def require_files(paths: Sequence[Path] | None) -> list[Path]:
    if not paths:
        raise UsageError("give --from OUT.json: a file that flowspec bench run wrote with --json")
    return list(paths)
