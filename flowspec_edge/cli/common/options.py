"""Options that several commands share.

A hidden option of a panel is for rare needs: ``--help-all`` shows it.  A hidden one without a panel is a
former spelling that keeps working.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowspec_edge.errors import UsageError

Clock = Literal["wall", "virtual"]
Dtype = Literal["fp32", "bf16", "fp16"]
DtypeChoice = Literal["auto", "fp32", "bf16", "fp16"]
MOST_STAGES = 256
MOST_AT_ONCE = 1024  # requests that share the stages
MOST_TOKENS = 1 << 24
MOST_REPEATS = 1_000_000  # of anything that is measured, drawn or printed
MOST_SECONDS = 1e7
_MOST_DIGITS = 9  # of a whole number in a list
# The panels of --help.
MODEL, STRATEGY, SAMPLING, TIME = "Model", "Strategy", "Sampling", "Devices and time"
PROMPTS, OUTPUT, SERVICE = "Prompts", "Output", "Service"


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


ModelOption = Annotated[str, typer.Option(
    "--model", metavar="NAME|DIR", rich_help_panel=MODEL,
    help="A name of flowspec models list, or a directory: a Hugging Face checkpoint, one with target/ and "
         "eagle2/, or a sharded model.")]
StagesOption = Annotated[int, typer.Option(
    "--stages", help="Verification devices V1…VN.  [default: 4, or those of a sharded model]",
    show_default=False, callback=_at_least_one, metavar="N",
    rich_help_panel=TIME)]  # 0: not given, see ``defaults.stages_of``
DtypeOption = Annotated[DtypeChoice, typer.Option(
    "--dtype", hidden=True, rich_help_panel=MODEL, help=(
        "Element type of activations, caches and weights that are not quantised; auto: the compute dtype of "
        "a sharded model, else fp32."))]
DeviceOption = Annotated[str, typer.Option(
    "--device", callback=_torch_device, metavar="DEVICE", hidden=True, rich_help_panel=MODEL,
    help="cpu, cuda or cuda:N; auto: a GPU if PyTorch sees one with enough memory for the model.")]
BoardModelOption = Annotated[str | None, typer.Option(
    "--board-model", help="With --cluster: the model's directory on the boards, if it is not the same path "
                          "as here.",
    metavar="DIR", show_default=False, hidden=True, rich_help_panel=MODEL)]
ChatTemplateOption = Annotated[str | None, typer.Option(
    "--chat-template", metavar="NAME|FILE", show_default=False, hidden=True, rich_help_panel=MODEL,
    help="llama-2, vicuna, bare (no format), or a file with a Jinja template; by default the "
         "tokenizer's own.")]
MaxNewTokensOption = Annotated[int, typer.Option(
    "--max-new-tokens", min=1, max=MOST_TOKENS, metavar="N", help="Most tokens of an answer.")]
FormerTokensOption = Annotated[int | None, typer.Option(
    "--answer-tokens", min=1, max=MOST_TOKENS, hidden=True)]
ClockOption = Annotated[Clock, typer.Option(
    "--clock", rich_help_panel=TIME, help="wall: one process per device.  virtual: simulated by a profile.")]
ProfileOption = Annotated[str, typer.Option(
    "--profile", help="The profile that virtual time uses: a name of flowspec profiles, a TOML file, or a "
                      "testbed, such as orin-nano-8gb-super:5/qwen3-32b/int4.",
    metavar="NAME|FILE|BOARD:N/MODEL/DTYPE", rich_help_panel=TIME)]
EmulateOption = Annotated[str | None, typer.Option(
    "--emulate", help="Real processes that compute, then wait until this profile's time is over; implies "
                      "--clock wall.",
    metavar="PROFILE", show_default=False, hidden=True, rich_help_panel=TIME)]
StrategyOption = Annotated[str, typer.Option(
    "--strategy", help="A name of flowspec strategies.", metavar="NAME", rich_help_panel=STRATEGY)]
ThreadsOption = Annotated[int, typer.Option(
    "--threads", min=0, max=4096, help="Threads of torch; 0: its default.")]
LogJsonOption = Annotated[bool, typer.Option(
    "--log-json", help="Log lines are JSON objects.", hidden=True, rich_help_panel=OUTPUT)]
FigureOption = Annotated[Path | None, typer.Option(
    "--out", help="Draw a figure, too.", metavar="F.svg|F.png", show_default=False, rich_help_panel=OUTPUT)]
JsonOption = Annotated[Path | None, typer.Option(
    "--json", help="Write the figures here, as JSON.", metavar="OUT", rich_help_panel=OUTPUT)]


def parse_counts(text: str, option: str, between: str = ",") -> list[int]:
    """Positive whole numbers, separated by ``between``."""
    parts = [part.strip() for part in text.split(between)]
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS and int(part)
               for part in parts):
        separator = "commas" if between == "," else f"an {between}"
        raise UsageError(f"{option} must be whole numbers from 1, separated by {separator}, not {text!r}")
    return [int(part) for part in parts]
