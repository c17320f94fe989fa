"""``flowspec demo``: an answer at two speeds, plain and with FlowSpec, over emulated boards on one machine."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.clusters import local_processes
from flowspec_edge.cli.common.options import (
    MOST_SECONDS,
    MOST_TOKENS,
    AnsweringModelOption,
    DeviceOption,
    StagesOption,
    not_nan,
)
from flowspec_edge.cli.common.plain_speed import PLAIN
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.place import Virtual
from flowspec_edge.errors import UsageError
from flowspec_edge.model.opened import ANSWERING, DEMO, answering_model, resolve_model
from flowspec_edge.strategies.params import DEFAULT_STRATEGY
from flowspec_edge.util.threads import cores

if TYPE_CHECKING:
    from flowspec_edge.cli.generate.side_by_side import CountTokens, SideBySide
    from flowspec_edge.d0.request import ClusterBackend, OnTokens, Request, Result
    from flowspec_edge.drivers.virtual.recording import Recording
    from flowspec_edge.model.text import TextStream

FLOWSPEC = DEFAULT_STRATEGY
_OTHERS = ("chunk_pp", "flowspec")  # for the table, while there is time
_PROFILE = "paper-7b"
_PICKED = "13"  # a held-out prompt of the small model whose answer does not go round in circles


def demo(
    question: Annotated[str | None, typer.Argument(
        help="What to ask.  Default: why the sky is blue; a model that does not chat continues a program.",
        show_default=False)] = None,
    model: AnsweringModelOption = None,
    stages: StagesOption = 0,
    device: DeviceOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(
        "--max-new-tokens", min=2, max=MOST_TOKENS, help="Maximum tokens of the answer.", metavar="N")] = 40,
    seconds: Annotated[float, typer.Option(
        "--seconds", min=1, max=MOST_SECONDS, callback=not_nan, metavar="S",
        help="Seconds after which no further measurement begins; it says what is left out.")] = 45.0,
) -> None:
    """Ask a question twice, plainly and with FlowSpec: the same words at two speeds.

    Five processes compute on this machine, then wait until the time of the paper's boards is over (EMULATED):
    five Orin Nanos with a 7B model.  A machine with fewer processors computes the answers in virtual time first, or
    takes what the model said when it was asked this before (flowspec record), then plays them back.  Every token is
    compared with plain decoding by transformers.

    Examples:

      flowspec demo
      flowspec demo "How does a bicycle stay upright?"
    """
    end = time.monotonic() + seconds

    from rich.console import Console

    from flowspec_edge.cli.common.options import (
        answering_dtype,
        device_of,
        dtype_of,
        plain_device_of,
        stages_of,
        weights_of,
    )
    from flowspec_edge.cli.common.workload import (
        fail_if_different,
        plain_decoding,
        requests_for,
        with_a_draft,
    )
    from flowspec_edge.cli.generate.side_by_side import SideBySide
    from flowspec_edge.device_profile import load_profile
    from flowspec_edge.lab.bench.exactness import exactness_text, types_of
    from flowspec_edge.lab.bench.results import BenchReport
    from flowspec_edge.lab.bench.runner import BenchPlan, Workload, measure
    from flowspec_edge.lab.bench.tables import show, table, title
    from flowspec_edge.lab.bench.tasks import Prompt
    from flowspec_edge.sampling.settings import Sampling
    from flowspec_edge.strategies.params import Params

    console = Console(highlight=False)
    name = model or answering_model()
    if model is None and name == DEMO:
        print(f"flowspec: note: {ANSWERING}, which answers questions, is not on this machine (flowspec models fetch "
              f"{ANSWERING}: 98 MB); the small model of the tests continues a program instead", file=sys.stderr)
    open_model, profile = resolve_model(name), load_profile(_PROFILE)
    stages = stages_of(open_model, stages)
    device = device_of(device, open_model, dtype_of(open_model, "auto"), processes=stages + 1)
    # More processes than processors would not keep the boards' time.
    emulates = device != "cpu" or stages + 1 <= cores()
    dtype = answering_dtype(open_model, "auto", device, "wall" if emulates else "virtual")
    reference = plain_device_of(device, open_model, dtype, stages + 1)
    params = with_a_draft(FLOWSPEC, open_model, Params())

    from flowspec_edge.drivers.processes.clusters import open_cluster
    from flowspec_edge.model.text import TextStream, Tokenizer

    tokenizer = Tokenizer(open_model)
    if question is None:
        question = _default_question(tokenizer.chats)
    [request] = requests_for(tokenizer, open_model, [Prompt("", "", question)], max_new_tokens, Sampling(), params,
                             chat=tokenizer.chats)
    recorded = None if emulates else _recorded(name, request)
    backend = local_processes(stages, device, profile) if emulates else Virtual(profile, recording=recorded)
    clock = "wall" if emulates else "virtual"
    label = title(clock, profile.name, stages, 0)
    about = [label]
    if not emulates:
        about.append(f"played back, since this machine has {cores()} processors for {stages + 1} processes")
    if recorded:
        about.append("the answer and the head's drafts are recorded ones of this model")
    console.print(f"[bold]{open_model.name}[/bold] on the paper's {stages + 1} boards: {'; '.join(about)}")
    console.print(f"\n{question}\n", style="cyan", markup=False)

    def working(message: str) -> AbstractContextManager[object]:
        return console.status(message) if console.is_terminal else nullcontext()

    results: dict[str, Result] = {}
    columns = SideBySide(console, ["plain pipelining", "FlowSpec"])
    spec = ClusterSpec(open_model.path, stages, dtype, device=device, at_once=1)
    with _late_emulation() as late, open_cluster(spec, backend) as cluster:
        requests = {strategy: replace(request, strategy=strategy) for strategy in (PLAIN, FLOWSPEC, *_OTHERS)}
        if emulates:
            with columns.shown():
                for number, strategy in enumerate((PLAIN, FLOWSPEC)):
                    with columns.answer(number) as (write, count):
                        stream = TextStream(tokenizer.decode, write)
                        results[strategy] = _streamed(cluster, requests[strategy], stream, count)
        else:
            for strategy in (PLAIN, FLOWSPEC):
                with working(f"computing the answer of {strategy}"):
                    results[strategy] = cluster.generate_many([requests[strategy]])[0]
            with columns.shown():
                _play([results[PLAIN], results[FLOWSPEC]], columns, tokenizer.decode, console.is_terminal)
        for strategy in _OTHERS:
            if time.monotonic() < end:
                with working(f"measuring {strategy}"):
                    results[strategy] = cluster.generate(requests[strategy])

    with working("plain decoding by transformers"):
        decode, explains = plain_decoding(open_model, dtype, reference)
        types = {"dtype": dtype, "weights": weights_of(open_model, dtype)}
        report = BenchReport(None, clock, types)
        measure(_Finished(results, clock), decode, BenchPlan(list(results), [Workload("", [request])], [0.0]), report,
                explains=explains)
    console.print(f"\n{_verdict(results[PLAIN], results[FLOWSPEC])}")
    if late:
        options = f"--chat --model {open_model.name}" if tokenizer.chats else f"--model {open_model.name}"
        console.print("This machine is too slow or too busy to keep the boards' time, so these speeds are too low.  "
                      f"Virtual time needs no fast machine: flowspec bench run {options} --limit 4")
    console.print()
    show(console, table(report.rows, f"{label}, one answer, {types_of(types)}"))
    if missing := [name for name in _OTHERS if name not in results]:
        console.print(f"Left out, since {seconds:g} s were over (--seconds): {', '.join(missing)}.")
    fail_if_different(report.differences)
    console.print(exactness_text(report.samples, types))
    console.print("One answer says little: flowspec bench run measures many, in virtual time.")


def _recorded(model: str, request: Request) -> Recording | None:
    """Return this package's recording of the model, if it has the answer; None if it has to be computed."""
    from flowspec_edge.cli.common.workload import shipped_recording
    from flowspec_edge.drivers.virtual.recorded import answer_to
    from flowspec_edge.drivers.virtual.recording import load_recording

    path = shipped_recording(model)
    if not path.is_file():
        return None
    recording = load_recording(path)
    try:
        answer_to(request, recording)
    except UsageError:
        return None
    return recording


def _streamed(cluster: ClusterBackend, request: Request, stream: TextStream, count: CountTokens) -> Result:
    def on_tokens(tokens: list[int]) -> None:
        count(tokens)
        stream.push(tokens)

    result = cluster.generate(request, on_tokens)
    stream.close()
    return result


def _play(results: Sequence[Result], columns: SideBySide, decode: Callable[[Sequence[int]], str], at_pace: bool
          ) -> None:
    """Show complete answers: all at once at the pace of their own clock, or one after the other without waiting."""
    from flowspec_edge.model.text import TextStream

    if not at_pace:
        for number, result in enumerate(results):
            with columns.answer(number) as (write, count):
                stream = TextStream(decode, write)
                for at, token in zip(result.token_at, result.tokens, strict=True):
                    count([token], at)
                    stream.push([token])
                stream.close()
        return
    with ExitStack() as stack:
        answers = [stack.enter_context(columns.answer(number)) for number in range(len(results))]
        streams = [TextStream(decode, write) for write, _ in answers]
        began = time.monotonic()
        times = sorted((at, number, index) for number, result in enumerate(results)
                       for index, at in enumerate(result.token_at))
        for at, number, index in times:
            time.sleep(max(0.0, began + at - time.monotonic()))  # the viewer sees the boards' own pace
            token = results[number].tokens[index]
            answers[number][1]([token], at)
            streams[number].push([token])
        for stream in streams:
            stream.close()


@contextmanager
def _late_emulation() -> Iterator[list[str]]:
    """Yield D0's warnings of an emulation that is late, which are not printed into the answers."""
    from flowspec_edge.d0 import core

    warned: list[str] = []

    def print_others(record: logging.LogRecord) -> bool:
        if is_late := record.msg == core.LATE_EMULATION:
            warned.append(record.getMessage())
        return not is_late

    core.log.addFilter(print_others)
    try:
        yield warned
    finally:
        core.log.removeFilter(print_others)


def _default_question(chats: bool) -> str:
    from flowspec_edge.cli.common.workload import chat_questions, demo_prompts
    from flowspec_edge.lab.bench.tasks import load_prompts

    if chats:
        return load_prompts(chat_questions(), 1)[0].text
    return next(prompt.text for prompt in load_prompts(demo_prompts()) if prompt.id == _PICKED)


def _verdict(plain: Result, fast: Result) -> str:
    speeds = plain.stats.tokens_per_second, fast.stats.tokens_per_second
    if None in speeds or plain.tokens != fast.tokens:
        return f"FlowSpec wrote {len(fast.tokens)} tokens, plain pipelining {len(plain.tokens)}."
    before, after = (speed or 0.0 for speed in speeds)
    return (f"[bold]The same {len(plain.tokens)} tokens: {after:.1f} tokens/s with FlowSpec, {before:.1f} without: "
            f"{after / before:.1f} times as fast.[/bold]")


class _Finished:
    """A cluster that has answered: one request, by each of some strategies."""

    def __init__(self, results: Mapping[str, Result], clock: str) -> None:
        self._results, self.clock = results, clock

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        return self._results[request.strategy]

    def generate_many(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None) -> list[Result]:
        return [self._results[request.strategy] for request in requests]

    def close(self) -> None:
        pass
