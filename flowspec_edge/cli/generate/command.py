"""``flowspec generate``: continue one text, or answer one question."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowspec_edge.cli.common.clusters import INTERRUPTED, answer, choose_clock
from flowspec_edge.cli.common.option_groups import select_strategy, with_dataclasses
from flowspec_edge.cli.common.options import (
    OUTPUT,
    PROMPTS,
    TIME,
    ChatTemplateOption,
    ClockOption,
    DeviceOption,
    DtypeOption,
    EmulateOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
    StrategyOption,
    TemplateKwargsOption,
    answering_dtype,
    device_of,
    dtype_of,
    stages_of,
    template_values,
)
from flowspec_edge.cli.common.streams import saved
from flowspec_edge.cli.common.workload import require_fitting, require_runnable, with_a_draft
from flowspec_edge.cli.generate.remote import RemoteRequest, figures_line, generate_remotely, refuse_local
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import Message, Rendering, require_template
from flowspec_edge.model.opened import DEMO, Origin, choose_sampling, not_applied, resolve_model
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params
from flowspec_edge.strategies.registry import require_strategy, strategy_class
from flowspec_edge.util.bounded_read import as_text, bounded, read_bytes, read_json_object
from flowspec_edge.util.files import check_writable, write_output
from flowspec_edge.util.terminal import counted_stages

if TYPE_CHECKING:
    from flowspec_edge.d0.observer import Observer
    from flowspec_edge.d0.request import Request, Result
    from flowspec_edge.model.grammar import Grammar
    from flowspec_edge.model.text import Tokenizer

_MAX_PROMPT = 4 * 1024 * 1024  # bytes; a million tokens of English

TraceOption = Annotated[Path | None, typer.Option(
    "--trace", metavar="F", show_default=False, hidden=True, rich_help_panel=OUTPUT,
    help="Write a trace of every segment on every device, for ui.perfetto.dev.")]
_ANY_OBJECT = {"type": "object"}


@with_dataclasses(sampling=Sampling, params=Params, strategies=select_strategy)
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(
        help="The text to continue; with --chat, the question.", show_default=False)] = None,
    prompt_file: Annotated[str | None, typer.Option(
        "--prompt-file", help="Read the text from a file; -: standard input.", metavar="F",
        rich_help_panel=PROMPTS)] = None,
    chat: Annotated[bool, typer.Option(
        "--chat", help="The text is a question: apply the model's chat template.",
        rich_help_panel=PROMPTS)] = False,
    system: Annotated[str | None, typer.Option(
        "--system", help="With --chat: the system's message.", metavar="TEXT", show_default=False,
        hidden=True, rich_help_panel=PROMPTS)] = None,
    max_new_tokens: MaxNewTokensOption = 128,
    model: ModelOption = DEMO,
    chat_template: ChatTemplateOption = None,
    chat_template_kwargs: TemplateKwargsOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    strategy: StrategyOption = DEFAULT_STRATEGY,
    stages: StagesOption = 0,
    clock: ClockOption = "wall",
    profile: ProfileOption = "paper-7b",
    emulate: EmulateOption = None,
    cluster: Annotated[Path | None, typer.Option(
        "--cluster", metavar="FILE", show_default=False, rich_help_panel=TIME,
        help="Ask the deployed service of this cluster.toml; it determines the model and all options of the "
             "devices.")] = None,
    as_json: Annotated[bool, typer.Option(
        "--json", help="Print a JSON object, not the text.", rich_help_panel=OUTPUT)] = False,
    json_schema: Annotated[Path | None, typer.Option(
        "--json-schema", metavar="FILE", show_default=False, hidden=True, rich_help_panel=OUTPUT,
        help="The answer is JSON for this JSON schema, unless --max-new-tokens cuts it off.")] = None,
    json_object: Annotated[bool, typer.Option(
        "--json-object", help="The answer is any JSON object.", hidden=True, rich_help_panel=OUTPUT)] = False,
    trace: TraceOption = None,
    verbose: Annotated[bool, typer.Option(
        "--verbose", help="A live line per stage, on stderr.", hidden=True, rich_help_panel=OUTPUT)] = False,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Continue a text over a pipeline of stages, streaming it as it is accepted.

    Sampling options default to those of the model's generation_config.json, if it samples.  With --cluster
    the answer comes from the draft service of a deployed cluster, over ssh.

    Examples:

      flowspec generate "def fibonacci(n):"
      flowspec generate --prompt-file draft.py --temperature 1 --seed 7
      flowspec generate "import os" --strategy flowspec --set depth=6 --clock virtual --json
      flowspec generate --chat "What is a pipeline?" --model vicuna-7b-v1.5
      flowspec generate "Rome:" --json-schema city.json --max-new-tokens 300
      flowspec generate "def fibonacci(n):" --cluster cluster.toml
    """
    text = _read_prompt(prompt, prompt_file)
    if cluster is not None:
        refuse_local(explicit_options(context, context.params))
    for option, value in (("system", system), ("chat-template", chat_template),
                          ("chat-template-kwargs", chat_template_kwargs)):
        if value is not None and not chat:
            raise UsageError(f"--{option} works with --chat only")
    values = template_values(chat_template_kwargs)
    require_strategy(strategy)
    schema = _schema(json_schema, json_object)
    if cluster is not None:
        strategy_type = strategy_class(strategy)
        strategy_name = strategy_type.name if explicit_options(context, ["strategy"]) else None
        explicit = explicit_options(context, asdict(sampling))
        generate_remotely(cluster, RemoteRequest(text, chat, system, strategy_name, max_new_tokens, sampling,
                                                 explicit, schema, values), as_json)
        return
    open_model = resolve_model(model)
    clock_settings = choose_clock(clock, profile, emulate)
    stages = stages_of(open_model, stages, clock_settings.profile)
    if chat:
        require_template(open_model, chat_template)
    strategy_type = strategy_class(strategy)
    params = with_a_draft(strategy_type.name, open_model, params)
    require_runnable([strategy_type.name], open_model, params, clock_settings.clock, stages)
    if trace is not None:
        check_writable(trace)
    device = device_of(device, open_model, dtype_of(open_model, dtype), processes=clock_settings.processes(stages))
    sampling, origins = choose_sampling(sampling, explicit_options(context, asdict(sampling)), open_model)
    if verbose:
        logging.basicConfig(format="%(message)s")  # to stderr
        logging.getLogger("flowspec_edge").setLevel(logging.INFO)

    from flowspec_edge.cli.common.plain_speed import PLAIN, plain_speed, shared_processors
    from flowspec_edge.d0.request import Request
    from flowspec_edge.drivers.processes.clusters import open_cluster
    from flowspec_edge.model.text import TextStream, Tokenizer

    tokenizer = Tokenizer(open_model, chat_template)
    if chat:
        messages = [Message("system", system)] if system is not None else []
        ids, before = tokenizer.chat([*messages, Message("user", text)], rendering=Rendering(values)), []
        if unknown_values := [name for name in values if not tokenizer.reads(name)]:
            print(f"flowspec: note: the chat template of {open_model.name} does not read {', '.join(unknown_values)}",
                  file=sys.stderr)
        stops = open_model.stop_ids | tokenizer.chat_stop_ids
    else:
        ids = before = tokenizer.encode(text)
        stops = open_model.stop_ids
    require_fitting(len(ids), open_model, max_new_tokens)
    if ignored := not_applied(open_model, sampling):
        print(f"flowspec: note: {open_model.name} asks for options that are not applied here: "
              f"{', '.join(ignored)}", file=sys.stderr)
    grammar = _grammar(tokenizer, schema, stops, json_schema)
    request = Request(ids, strategy_type.name, max_new_tokens, sampling, params, stops, grammar=grammar)
    pieces: list[str] = []
    stream = TextStream(tokenizer.decode, pieces.append if as_json else _write, before)
    about = {"model": open_model.name, "stages": stages, "clock": clock_settings.clock,
             "profile": clock_settings.profile_name, "device": device}
    with (write_trace(trace, request, stages, about, tokenizer.decode, before) as watch,
          open_cluster(ClusterSpec(open_model.path, stages,
                                   answering_dtype(open_model, dtype, device, clock_settings.clock),
                                   device=device, observer=watch, at_once=1),
                       clock_settings.backend(stages, device)) as devices):
        result = answer(devices, request, stream.push)
        stream.close()
        if not as_json:
            _write("\n")
        shared = shared_processors(clock_settings, strategy_type.name, stages, device)
        cancelled = result.finish_reason == "cancelled"  # by Ctrl-C
        compares = shared is not None and not (as_json or cancelled or trace is not None)
        plain = plain_speed(devices, request, result) if compares else None
    if as_json:
        labels = {"clock": clock_settings.clock, "profile": clock_settings.profile_name,
                  "emulated": clock_settings.emulated, "device": device,
                  "sampling": {name: {"value": value, "from": origins[name]}
                               for name, value in asdict(sampling).items()}}
        print(json.dumps(result.as_json("".join(pieces)) | labels))
    else:
        from flowspec_edge.lab.bench.tables import timing as timing_label

        label = timing_label(clock_settings.clock, clock_settings.profile_name)
        device_text = "" if device == "cpu" else f"{device}, "
        setup = f"{strategy}, {counted_stages(stages)}, {device_text}{label}"
        print(summary(result, setup, sampling_note(sampling, origins), plain), file=sys.stderr)
        if plain is not None and plain > (result.stats.tokens_per_second or plain):
            print(f"flowspec: note: plain decoding was faster, {shared}: try --strategy {PLAIN}, or fewer "
                  "--stages", file=sys.stderr)
    if cancelled:
        raise typer.Exit(INTERRUPTED)


def summary(result: Result, setup: str, sampling: str = "", plain: float | None = None) -> str:
    """Sum up a result in one line; ``plain``: tokens/s of plain decoding, if it was measured."""
    stats = result.stats
    figures = figures_line(len(result.tokens), result.finish_reason, stats.tokens_per_second, stats.alt,
                           stats.alr, stats.ttft_s, stats.energy_j, plain)
    return f"[{setup}: {figures}{sampling and f'; {sampling}'}]"


def sampling_note(sampling: Sampling, origins: Mapping[str, Origin]) -> str:
    """Return the sampling values that are not defaults, with their origins; may be empty."""
    return ", ".join(f"{name.replace('_', '-')} {value}" +
                     ("" if origins[name] == "command line" else f" from {origins[name]}")
                     for name, value in asdict(sampling).items() if origins[name] != "default")


def explicit_options(context: typer.Context, names: Iterable[str]) -> set[str]:
    sources = {name: context.get_parameter_source(name) for name in names}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give either a prompt or --prompt-file")
    if prompt_file is None:
        text = prompt or ""
    else:
        data = (bounded(sys.stdin.buffer.read(_MAX_PROMPT + 1), "standard input", _MAX_PROMPT)
                if prompt_file == "-" else read_bytes(Path(prompt_file), _MAX_PROMPT))
        text = as_text(data, prompt_file)
    if not text:
        raise UsageError("the prompt is empty; give some text to continue")
    return text


def _schema(path: Path | None, any_object: bool) -> dict[str, Any] | None:
    """Return what the answer must match; None: any text."""
    if path is None:
        return _ANY_OBJECT if any_object else None
    if any_object:
        raise UsageError("--json-object and --json-schema exclude each other")
    return read_json_object(path)


def _grammar(tokenizer: Tokenizer, schema: dict[str, Any] | None, stop_ids: frozenset[int], path: Path | None
             ) -> Grammar | None:
    """Raise UsageError, which names ``path``, for a schema that cannot be enforced."""
    if schema is None:
        return None
    compiler = tokenizer.grammars
    try:
        return compiler.json_schema(schema, stop_ids)
    except UsageError as error:
        raise UsageError(f"{path or '--json-object'}: {error}") from error


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def write_trace(path: Path | None, request: Request, stages: int, about: dict[str, Any],
                decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> Iterator[Observer | None]:
    """Yield an observer whose trace is written to ``path`` when the request ends or fails; None without a ``path``."""
    if path is None:
        yield None
        return
    from flowspec_edge.drivers.observe.chrome_trace import chrome_trace
    from flowspec_edge.drivers.observe.timeline import RequestTimeline

    trace, is_written = RequestTimeline(request), False
    try:
        yield trace
    finally:
        if trace.events:
            document = chrome_trace(trace, stages, about, decode, before)
            is_written = saved(path, partial(write_output, path, json.dumps(document, ensure_ascii=False)))
        note = ("the request had not begun, so there is no trace" if not trace.events else
                f"there is no trace in {path}" if not is_written else
                f"its trace is in {path}" if trace.result else
                f"the trace up to here is in {path}")
        print(f"flowspec: {note}", file=sys.stderr)
