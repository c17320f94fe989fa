"""``flowspec generate``: continue one text."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.bench.prompts import Prompt
from flowspec_edge.cli.clusters import open_cluster, timing
from flowspec_edge.cli.measuring import requests_for, require_runnable
from flowspec_edge.cli.options import (
    ClockOption,
    DtypeOption,
    EmulateOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
    with_dataclasses,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import DEMO, resolve_model
from flowspec_edge.runtime.request import Result
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class

_EXAMPLES = """
Examples:

  flowspec generate "def fibonacci(n):"

  flowspec generate --prompt-file draft.py --temperature 1 --seed 7

  flowspec generate "import os" --strategy chunk_pp --clock virtual --json

  flowspec generate "import os" --emulate paper-7b
"""


@with_dataclasses(sampling=Sampling, params=Params)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=False)] = None,
    prompt_file: Annotated[str | None, typer.Option(
        "--prompt-file", help="Read the text from a file; - is standard input.", metavar="F")] = None,
    model: ModelOption = DEMO,
    strategy: Annotated[str, typer.Option("--strategy", help="See: flowspec strategies.")] = "flowspec",
    stages: StagesOption = 4,
    dtype: DtypeOption = "fp32",
    max_new_tokens: MaxNewTokensOption = 128,
    clock: ClockOption = "wall",
    profile: ProfileOption = "paper-7b",
    emulate: EmulateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not the text.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="A live line per stage, on stderr.")] = False,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Continue a text over a pipeline of stages, streaming it as it is accepted."""
    text = _read_prompt(prompt, prompt_file)
    chosen = strategy_class(strategy)
    found = resolve_model(model)
    when = timing(clock, profile, emulate)
    require_runnable([chosen.name], found, params, when.clock, stages)
    if verbose:
        logging.basicConfig(format="%(message)s")  # to stderr
        logging.getLogger("flowspec_edge").setLevel(logging.INFO)

    from flowspec_edge.text import TextStream, Tokenizer

    tokenizer = Tokenizer(found)
    [fitting] = requests_for(tokenizer, found, [Prompt("", "", text)], max_new_tokens, sampling, params)
    request = replace(fitting, strategy=chosen.name)
    stream = None if as_json else TextStream(tokenizer.decode, _write)
    with open_cluster(when, found, stages, dtype) as cluster:
        result = cluster.generate(request, stream.push if stream else None)
    if stream is None:
        labels = {"clock": when.clock, "profile": when.profile.name if when.profile else None,
                  "emulated": when.emulated}
        print(json.dumps(result.as_json(tokenizer.decode(result.tokens)) | labels))
        return
    stream.close()
    _write("\n")
    from flowspec_edge.bench.table import timing as timing_label

    label = timing_label(when.clock, when.profile.name if when.profile else None)
    print(summary(result, f"{strategy}, {stages} stages, {label}"), file=sys.stderr)


generate.__doc__ = f"{generate.__doc__}\n{_EXAMPLES}"


def summary(result: Result, how: str) -> str:
    """One line of figures for a person."""
    stats = result.stats
    return (f"[{how}: {len(result.tokens)} tokens ({result.finish_reason}), "
            f"{stats.tokens_per_second:.2f} tokens/s, {stats.alt:.2f} a turn, {stats.alr:.2f} a round, "
            f"first token after {stats.ttft_s:.2f} s]")


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give a prompt or --prompt-file, and not both")
    if prompt_file is None:
        text = prompt or ""
    else:
        try:
            data = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
            text = data.decode("utf-8")
        except OSError as error:
            raise UsageError(f"cannot read {prompt_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{prompt_file} is not UTF-8 text: byte {error.start}") from error
    if not text:
        raise UsageError("the prompt is empty; give some text to continue")
    return text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
