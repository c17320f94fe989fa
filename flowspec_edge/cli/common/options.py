"""Options that several commands share, and options made from the fields of dataclasses."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import BUILT_IN
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import PLUS_IDEAS, Params

Clock = Literal["wall", "virtual"]
Dtype = Literal["fp32", "bf16", "fp16"]
DtypeChoice = Literal["auto", "fp32", "bf16", "fp16"]
MOST_STAGES = 256
MOST_AT_ONCE = 1024  # requests that share the stages
MOST_TOKENS = 1 << 24
MOST_REPEATS = 1_000_000  # of anything that is measured, drawn or printed
MOST_SECONDS = 1e7
_MOST_DIGITS = 9  # of a whole number in a list


def _at_least_one(context: typer.Context, value: int) -> int:
    given = context.get_parameter_source("stages")
    if given is not None and given.name == "COMMANDLINE" and not 1 <= value <= MOST_STAGES:
        raise typer.BadParameter(f"{value} is not {'at least 1' if value < 1 else f'at most {MOST_STAGES}'}")
    return value


def not_nan(value: float | None) -> float | None:
    """For numbers with a smallest or largest value, which NaN passes."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


def _torch_device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise typer.BadParameter(f"{value!r} is not auto, cpu, cuda or cuda:N")
    return value


ModelOption = Annotated[
    str, typer.Option("--model", help="A model that comes with the package, or a directory: target/ with "
                                      "eagle2/, a Hugging Face checkpoint, or a sharded model.",
                      metavar="DIR")]
StagesOption = Annotated[int, typer.Option(
    "--stages", help="Verification devices V1…VN.  [default: 4, or those of a sharded model]",
    show_default=False, callback=_at_least_one)]  # 0: not given, see ``defaults.stages_of``
DtypeOption = Annotated[DtypeChoice, typer.Option(
    "--dtype", help="Element type of activations, caches and weights that are not quantised; auto: the "
                    "compute dtype of a sharded model, else fp32.")]
DeviceOption = Annotated[str, typer.Option(
    "--device", callback=_torch_device, metavar="DEVICE",
    help="cpu, cuda or cuda:N; auto: a GPU if PyTorch sees one with enough memory for the model.")]
BoardModelOption = Annotated[str | None, typer.Option(
    "--board-model", help="The model's directory on the boards, if it is not the same path as here.",
    metavar="DIR", show_default=False)]
ChatTemplateOption = Annotated[str | None, typer.Option(
    "--chat-template", metavar="NAME", show_default=False,
    help=f"{', '.join(BUILT_IN)}, or a file with a Jinja template; by default the tokenizer's own.")]
MaxNewTokensOption = Annotated[int, typer.Option(
    "--max-new-tokens", min=1, max=MOST_TOKENS, help="Most tokens of an answer.")]
ClockOption = Annotated[
    Clock, typer.Option("--clock", help="wall: one process per device.  virtual: simulated by a profile.")]
ProfileOption = Annotated[
    str, typer.Option("--profile", help="The profile that virtual time uses: a name or a TOML file.",
                      metavar="NAME")]
EmulateOption = Annotated[
    str | None, typer.Option("--emulate", help="Real processes that compute, then wait until this profile's "
                                               "time is over; implies --clock wall.", metavar="PROFILE",
                             show_default=False)]
StrategyOption = Annotated[str, typer.Option("--strategy", help="See: flowspec strategies.")]
ThreadsOption = Annotated[int, typer.Option(
    "--threads", min=0, max=4096, help="Threads of torch; 0: its default.")]
LogJsonOption = Annotated[bool, typer.Option("--log-json", help="Log lines are JSON objects.")]
FigureOption = Annotated[Path | None, typer.Option(
    "--out", help="Draw a figure, too.", metavar="F.svg|F.png", show_default=False)]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the figures here, as JSON.", metavar="OUT")]

_HELP = {
    "temperature": "0 takes the likeliest token.",
    "top_k": "Sample from the k likeliest tokens; 0 keeps all.",
    "top_p": "Sample from the smallest set of tokens with this mass.",
    "seed": "Seed of the noise; a seed gives the same text with every strategy.",
    "tree_size": "Nodes of the initial tree (L).",
    "width": "Children per expanded node, and nodes expanded per level (k).",
    "segment": "Longest segment (l).",
    "depth": "Levels of the initial tree (d0); EAGLE's depth 5 is 6 here.",
    "expand_depth": "Levels of a context-aware expansion (d_exp).",
    "expand_size": "Nodes of a context-aware expansion (L_exp).",
    "extend_depth": "Levels of a score-aware expansion.",
    "extend_size": "Nodes of a score-aware expansion.",
    "prefill_chunk": "Prompt tokens per segment.",
    "rank": "How drafted children are ranked when sampling: by the draft's confidence alone, or with the "
            "noise that the target will be sampled with.",
    "tau": "Softness of the noise ranking.",
    "draft": "The draft model: each strategy's own kind, or this kind for all strategies that draft except "
             "SPD; ngram looks up in the text and needs no model.",
    "ngram": "Merge n-gram continuations into the drafts.",
    "ngram_max": "Longest run of tokens that is looked up in the text.",
    "ngram_min": "Shortest run of tokens that is looked up.",
    "plus_width": "Nodes that a draft pass of FlowSpec+ expands.",
    "plus_rows": "Longest segment of FlowSpec+; 0: by the stages' curve, --segment without one.",
    "plus_without": f"Ideas of FlowSpec+ to switch off, separated by commas: {', '.join(PLUS_IDEAS)}.",
    "pipedec_width": "Nodes of a tree layer (w).",
    "pipedec_children": "Children per node (c).",
    "pipeinfer_tokens": "Longest micro-batch, in tokens of one sequence.",
    "pipeinfer_sequences": "Branches of a micro-batch.",
    "pipeinfer_accept": "Confidence cutoff at the start.",
    "pipeinfer_split": "Confidence from which a second child starts a branch.",
    "pipeinfer_recovery": "Added to the cutoff by every micro-batch until a run returns.",
    "pipeinfer_decay": "Subtracted from the cutoff by every attempt that it stopped.",
    "pipeinfer_canonical": "Which accepted tokens get a one-token run: all, or only those in no run "
                           "yet.",
    "pearl_gamma": "Draft tokens a block; 0: as many as fit into one verification.",
    "speculative_gamma": "Draft tokens a verification.",
    "stpp_branching": "Children per node of the static tree, level by level.",
    "spd_width": "Branches kept (W).",
}
_PANELS = {Sampling: "Sampling", Params: "FlowSpec and its ablations; all strategies"}
_OTHERS = ("pipedec", "pipeinfer", "pearl", "speculative", "stpp", "spd")


def parse_counts(text: str, option: str, between: str = ",") -> list[int]:
    """Positive whole numbers, separated by ``between``."""
    parts = [part.strip() for part in text.split(between)]
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS and int(part)
               for part in parts):
        separator = "commas" if between == "," else f"an {between}"
        raise UsageError(f"{option} must be whole numbers from 1, separated by {separator}, not {text!r}")
    return [int(part) for part in parts]


def with_dataclasses(without: Collection[str] = (), **groups: Any,
                     ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace each named parameter of a command by one option per dataclass field not in ``without``; a group
    is a dataclass, or an instance with other defaults."""
    defaults = {name: group() if isinstance(group, type) else group for name, group in groups.items()}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        given_own = inspect.signature(command, eval_str=True).parameters.values()
        own = [parameter for parameter in given_own if parameter.name not in groups]
        options = [option for group in defaults.values() for option in _options(group, without)]

        @wraps(command)
        def run(**given: Any) -> Any:
            built = {name: replace(group, **{f.name: given.pop(f.name) for f in fields(group)
                                             if f.name not in without})
                     for name, group in defaults.items()}
            return command(**given, **built)

        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
        return run

    return decorate


def _options(group: Any, without: Collection[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(type(group), include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, field.name),
            annotation=_annotated(hints[field.name], type(group), field.name))
        for field in fields(group) if field.name not in without
    ]


def _annotated(hint: Any, group: type[Any], name: str) -> Any:
    if get_origin(hint) is Annotated:  # the field describes its option itself
        return hint
    option = name.replace("_", "-")
    return Annotated[hint, typer.Option(f"--{option}/--no-{option}" if hint is bool else f"--{option}",
                                        help=_HELP.get(name), rich_help_panel=_panel(group, name))]


def _panel(group: type[Any], field: str) -> str | None:
    strategy = field.split("_")[0]
    if strategy == "plus":
        return "FlowSpec+"
    return "Other strategies" if strategy in _OTHERS else _PANELS.get(group)
