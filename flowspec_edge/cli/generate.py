"""``flowspec generate``: continue one text, or answer one question.

Knows which sampling options were given and which the model's makers may fill in.  Does not know chat
templates.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.bench.output import check_writable
from flowspec_edge.chat import BUILT_IN, Message
from flowspec_edge.cli.clusters import open_cluster, timing
from flowspec_edge.cli.cut import dtype_of, stages_of
from flowspec_edge.cli.generate_remote import Question, generate_there, refuse_local
from flowspec_edge.cli.measuring import require_fitting, require_runnable
from flowspec_edge.cli.options import (
    ClockOption,
    DeviceOption,
    DtypeOption,
    EmulateOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
    with_dataclasses,
)
from flowspec_edge.cli.torch_device import device_of
from flowspec_edge.cli.tracing import TraceOption, traced
from flowspec_edge.errors import UsageError
from flowspec_edge.generation import Origin, choose_sampling, not_applied
from flowspec_edge.modeldir import DEMO, resolve_model
from flowspec_edge.runtime.request import Request, Result
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params
from flowspec_edge.strategies.registry import strategy_class

_EXAMPLES = """
Examples:

  flowspec generate "def fibonacci(n):"

  flowspec generate --prompt-file draft.py --temperature 1 --seed 7

  flowspec generate "import os" --strategy chunk_pp --clock virtual --json

  flowspec generate "import os" --emulate paper-7b

  flowspec generate "import os" --clock virtual --trace trace.json

  flowspec generate --chat "What is a pipeline?" --model vicuna-7b-v1.5

  flowspec generate "def fibonacci(n):" --cluster cluster.toml
"""


@with_dataclasses(sampling=Sampling, params=Params)
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(
        help="The text to continue; with --chat, the question.", show_default=False)] = None,
    prompt_file: Annotated[str | None, typer.Option(
        "--prompt-file", help="Read the text from a file; - is standard input.", metavar="F")] = None,
    chat: Annotated[bool, typer.Option(
        "--chat", help="The text is a question: put it into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(
        "--system", help="With --chat: the system's message.", metavar="TEXT", show_default=False)] = None,
    chat_template: Annotated[str | None, typer.Option(
        "--chat-template", metavar="NAME", show_default=False, help=(
            f"With --chat: {', '.join(BUILT_IN)}, or a file with a Jinja template; by default the "
            "tokenizer's own."))] = None,
    model: ModelOption = DEMO,
    strategy: Annotated[str, typer.Option("--strategy", help="See: flowspec strategies.")] = DEFAULT_STRATEGY,
    stages: StagesOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_new_tokens: MaxNewTokensOption = 128,
    clock: ClockOption = "wall",
    profile: ProfileOption = "paper-7b",
    emulate: EmulateOption = None,
    cluster: Annotated[Path | None, typer.Option(
        "--cluster", metavar="FILE", show_default=False,
        help="Ask the service that flowspec deploy brought to the boards of this cluster.toml; it decides "
             "the model, and all that is not about the answer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not the text.")] = False,
    trace: TraceOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="A live line per stage, on stderr.")] = False,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Continue a text over a pipeline of stages, streaming it as it is accepted.

    Sampling options that are not given are those of the model's generation_config.json, if it samples.
    With --cluster the answer comes from the draft service of a deployed cluster, over ssh.
    """
    text = _read_prompt(prompt, prompt_file)
    if cluster is not None:
        refuse_local(given(context, context.params))
    if not chat and (system is not None or chat_template is not None):
        raise UsageError(f"{'--chat-template' if system is None else '--system'} goes with --chat only")
    chosen = strategy_class(strategy)
    if cluster is not None:
        named = chosen.name if given(context, ["strategy"]) else None
        generate_there(cluster, Question(text, chat, system, named, max_new_tokens, sampling,
                                         given(context, asdict(sampling))), as_json)
        return
    found = resolve_model(model)
    stages = stages_of(found, stages)
    when = timing(clock, profile, emulate)
    require_runnable([chosen.name], found, params, when.clock, stages)
    if trace is not None:
        check_writable(trace)
    device = device_of(device, found, dtype_of(found, dtype), processes=when.processes(stages))
    sampling, origins = choose_sampling(sampling, given(context, asdict(sampling)), found)
    if verbose:
        logging.basicConfig(format="%(message)s")  # to stderr
        logging.getLogger("flowspec_edge").setLevel(logging.INFO)

    from flowspec_edge.text import TextStream, Tokenizer

    tokenizer = Tokenizer(found, chat_template)
    if chat:
        asked = [Message("system", system)] if system is not None else []
        ids, before = tokenizer.chat([*asked, Message("user", text)]), []
        stops = found.stop_ids | tokenizer.chat_stop_ids
    else:
        ids = before = tokenizer.encode(text)
        stops = found.stop_ids
    require_fitting(len(ids), found, max_new_tokens)
    if ignored := not_applied(found, sampling):
        print(f"flowspec: note: {found.name} asks for what is not applied here: {', '.join(ignored)}",
              file=sys.stderr)
    request = Request(ids, chosen.name, max_new_tokens, sampling, params, stops)
    pieces: list[str] = []
    stream = TextStream(tokenizer.decode, pieces.append if as_json else _write, before)
    about = {"model": found.name, "stages": stages, "clock": when.clock,
             "profile": when.profile.name if when.profile else None, "device": device}
    with (traced(trace, request, stages, about, tokenizer.decode, before) as watch,
          open_cluster(when, found, stages, dtype, observer=watch, device=device) as devices):
        result = devices.generate(request, stream.push)
    stream.close()
    if as_json:
        labels = {"clock": when.clock, "profile": when.profile.name if when.profile else None,
                  "emulated": when.emulated, "device": device,
                  "sampling": {name: {"value": value, "from": origins[name]}
                               for name, value in asdict(sampling).items()}}
        print(json.dumps(result.as_json("".join(pieces)) | labels))
        return
    _write("\n")
    from flowspec_edge.bench.table import timing as timing_label

    label = timing_label(when.clock, when.profile.name if when.profile else None)
    where = "" if device == "cpu" else f"{device}, "
    print(summary(result, f"{strategy}, {stages} stages, {where}{label}", drawn(sampling, origins)),
          file=sys.stderr)


generate.__doc__ = f"{cleandoc(generate.__doc__ or '')}\n{_EXAMPLES}"


def summary(result: Result, how: str, sampling: str = "") -> str:
    """One line of figures for a person."""
    stats = result.stats
    return (f"[{how}: {len(result.tokens)} tokens ({result.finish_reason}), "
            f"{stats.tokens_per_second:.2f} tokens/s, {stats.alt:.2f} a turn, {stats.alr:.2f} a round, "
            f"first token after {stats.ttft_s:.2f} s{sampling and f'; {sampling}'}]")


def drawn(sampling: Sampling, origins: Mapping[str, Origin]) -> str:
    """The sampling values that are not defaults, and where they came from; empty without any."""
    return ", ".join(f"{name.replace('_', '-')} {value}" +
                     ("" if origins[name] == "command line" else f" from {origins[name]}")
                     for name, value in asdict(sampling).items() if origins[name] != "default")


def given(context: typer.Context, names: Iterable[str]) -> set[str]:
    """Those options that are on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


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
