"""``flowspec chat``: a conversation in the terminal, its input and its /commands."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.clusters import choose_clock, first_interrupt, local_processes
from flowspec_edge.cli.common.option_groups import select_strategy, with_dataclasses
from flowspec_edge.cli.common.options import (
    OUTPUT,
    PROMPTS,
    AnsweringModelOption,
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    EmulateOption,
    MaxNewTokensOption,
    StagesOption,
    StrategyOption,
    TemplateKwargsOption,
    answering_dtype,
    device_of,
    dtype_of,
    stages_of,
    template_values,
)
from flowspec_edge.cli.common.plain_speed import PLAIN, shared_processors, sharing_note
from flowspec_edge.cli.common.workload import require_runnable, with_a_draft
from flowspec_edge.cli.generate.command import explicit_options
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import Rendering, require_template
from flowspec_edge.model.opened import DEMO, answering_model, choose_sampling, resolve_model
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params
from flowspec_edge.strategies.registry import require_strategy, strategy_class
from flowspec_edge.util.terminal import counted_stages

if TYPE_CHECKING:
    from flowspec_edge.cli.generate.chat_screen import ChatScreen
    from flowspec_edge.d0.request import Result
    from flowspec_edge.d0.request_queue import SharedCluster
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.serving.conversation import Conversation

_QUOTES = '"""'
_DEMO_TEMPLATE = "bare"
_REJOIN_S = 60.0  # for a lost stage to rejoin
_HELP = """/stats            figures of the last answer, of all answers, and of each stage
/live             show or hide a line per stage during an answer
/history          print the conversation
/retry            ask the last question again
/undo             remove the last question and its answer
/reset [SYSTEM]   start again, with a new system message if one is given
/help, /quit
Text between lines of \"\"\" is one message; Ctrl-C stops an answer, Ctrl-D ends the chat."""


@with_dataclasses(sampling=Sampling, params=Params, strategies=select_strategy)
def chat(
    context: typer.Context,
    model: AnsweringModelOption = None,
    system: Annotated[str | None, typer.Option(
        "--system", help="The system's message.", metavar="TEXT", show_default=False,
        rich_help_panel=PROMPTS)] = None,
    chat_template: ChatTemplateOption = None,
    chat_template_kwargs: TemplateKwargsOption = None,
    strategy: StrategyOption = DEFAULT_STRATEGY,
    stages: StagesOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_new_tokens: MaxNewTokensOption = 1024,
    emulate: EmulateOption = None,
    live: Annotated[bool, typer.Option(
        "--live", help="Print a line per stage during an answer.", rich_help_panel=OUTPUT)] = False,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Chat with a model over a pipeline of stages: answers stream, and caches keep the conversation.

    /help lists the commands within a chat.  Messages may also be piped in, one per line.

    Examples:

      flowspec chat
      flowspec chat --model vicuna-7b-v1.5
      flowspec chat --model ./llama-shards --temperature 0.7 --system "Answer in one sentence."
      flowspec chat --emulate paper-7b --live
      echo "What is a pipeline?" | flowspec chat --model vicuna-7b-v1.5
    """
    require_strategy(strategy)
    model = model or answering_model()
    open_model = resolve_model(model)
    clock_settings = choose_clock("wall", "paper-7b", emulate)
    alone = not (clock_settings.emulated or open_model.sharded or stages)  # one stage has the whole model
    stages = stages_of(open_model, 1 if alone else stages, clock_settings.profile)
    if demonstration := chat_template is None and model == DEMO:
        chat_template = _DEMO_TEMPLATE
    require_template(open_model, chat_template)
    rendering = Rendering(template_values(chat_template_kwargs))
    device = device_of(device, open_model, dtype_of(open_model, dtype), processes=clock_settings.processes(stages))
    has_draft_options = params != Params() or explicit_options(context, ["strategy"])  # for drafting, or for a strategy
    if plainly := alone and device == "cpu" and not has_draft_options:
        strategy = PLAIN
    strategy_type = strategy_class(strategy)
    params = with_a_draft(strategy_type.name, open_model, params)
    require_runnable([strategy_type.name], open_model, params, "wall", stages)
    explicit = explicit_options(context, asdict(sampling))
    sampling, _ = choose_sampling(sampling, explicit, open_model)

    from flowspec_edge.cli.generate.chat_screen import ChatScreen
    from flowspec_edge.d0.capacity import cache_rows
    from flowspec_edge.drivers.processes.clusters import open_cluster
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.serving.conversation import Conversation

    tokenizer = Tokenizer(open_model, chat_template)
    conversation = Conversation(tokenizer, open_model, max_new_tokens, system, rendering)
    spec = ClusterSpec(open_model.path, stages, answering_dtype(open_model, dtype, device), device=device, at_once=1,
                       cache_rows=cache_rows(open_model.max_positions, 1, params, stages), rejoin_within=_REJOIN_S)
    with (ChatScreen() as screen,
          open_cluster(spec, local_processes(stages, device, clock_settings.profile)) as cluster,
          _inputs() as messages):
        screen.live = live
        chatting = ChatSession(conversation, tokenizer, screen, cluster, strategy, sampling, params,
                            any_seed="seed" not in explicit)
        screen.note(f"{open_model.name}, {strategy_type.name}, {counted_stages(stages)}; /help for help")
        if demonstration:
            screen.note('this model continues Python, such as "def fibonacci(n):", and was not trained to '
                        "chat; give one that was as --model (flowspec models list)")
        if plainly:
            screen.note("plain decoding: on one machine's processors, drafting would make answers slower; "
                        f"--strategy {DEFAULT_STRATEGY} drafts nevertheless")
        if shared := shared_processors(clock_settings, strategy_type.name, stages, device):
            screen.note(sharing_note(shared))
        chatting.start()
        chatting.run(messages)


@dataclass(eq=False)
class ChatSession:
    """A chat; ``any_seed``: every answer gets its own seed."""

    conversation: Conversation
    tokenizer: Tokenizer
    screen: ChatScreen
    cluster: SharedCluster
    strategy: str
    sampling: Sampling
    params: Params
    any_seed: bool
    results: list[Result] = field(default_factory=list)

    def start(self) -> None:
        """Generate one token, so that the first question does not wait for the stages to start."""
        from flowspec_edge.d0.request import Request

        with self.screen.working("starting the stages"):
            self.cluster.generate(Request([0], self.strategy, 1, params=self.params))

    def run(self, messages: Iterator[ChatInput]) -> None:
        for typed in messages:
            name, _, argument = typed.text.strip().partition(" ")
            if not name:
                continue
            try:
                if typed.block or not name.startswith("/"):
                    self.answer(typed.text)
                elif name == "/quit":
                    return
                else:
                    self._run_command(name, argument.strip())
            except UsageError as error:
                self.screen.note(str(error))

    def answer(self, text: str) -> None:
        from flowspec_edge.d0.request import Request
        from flowspec_edge.model.text import TextStream

        question = self.conversation.ask(text)
        if question.omitted_exchanges:
            self.screen.note(f"[the context is full: the model no longer sees the first {question.omitted_exchanges} "
                             "exchanges]")
        sampling = self.sampling
        if self.any_seed and not sampling.greedy:
            sampling = replace(sampling, seed=secrets.randbelow(2**63))
        pieces: list[str] = []

        def write(piece: str) -> None:
            pieces.append(piece)
            self.screen.write(piece)

        stream = TextStream(self.tokenizer.decode, write)
        request = Request(question.prompt, self.strategy, question.limit, sampling, self.params,
                          self.conversation.stop_ids)
        ticket = self.cluster.submit(request, stream.push)
        with first_interrupt(ticket.cancel):  # a second one ends the program
            self.cluster.serve(ticket.done)
        result = ticket.result()
        stream.close()
        self.screen.end_line()
        if result.finish_reason == "cancelled":
            self.screen.note("[stopped]")
        elif result.finish_reason == "length":
            self.screen.note(f"[the answer was cut off after {question.limit} tokens]")
        self.results.append(result)
        self.conversation.answered(text, "".join(pieces))

    def _run_command(self, name: str, argument: str) -> None:
        commands: Mapping[str, Callable[[str], None]] = {
            "/help": lambda _: self.screen.note(_HELP), "/stats": lambda _: self.screen.stats(self.results),
            "/live": lambda _: self._toggle_live(), "/history": lambda _: self._show_history(),
            "/retry": lambda _: self.answer(self._take_back()), "/undo": lambda _: self._undo(),
            "/reset": lambda system: self.conversation.reset(system or None)}
        if name not in commands:
            raise UsageError(f"there is no {name}; /help lists the commands, and text between lines of "
                             f"{_QUOTES} is never a command")
        commands[name](argument)

    def _toggle_live(self) -> None:
        self.screen.live = not self.screen.live
        self.screen.note(f"[lines of the stages {'on' if self.screen.live else 'off'}]")

    def _show_history(self) -> None:
        for message in self.conversation.messages:
            self.screen.note(f"{message.role}: {message.content}")

    def _undo(self) -> None:
        self.screen.note(f"[removed: {self._take_back()}]")

    def _take_back(self) -> str:
        question = self.conversation.undo()
        if question is None:
            raise UsageError("nothing has been said yet")
        return question


@dataclass(frozen=True)
class ChatInput:
    """A line, which may be a command, or a block of lines, which is always a message."""

    text: str
    block: bool = False


@contextmanager
def _inputs() -> Iterator[Iterator[ChatInput]]:
    """Yield messages: lines, or blocks between lines of three quotes; a terminal gets line editing."""
    with ExitStack() as undo:
        if sys.stdin.isatty():
            undo.enter_context(_line_editing())
        yield _messages(_read_terminal if sys.stdin.isatty() else _read_pipe)


def _messages(read_line: Callable[[str], str | None]) -> Iterator[ChatInput]:
    """Yield messages from ``read_line``, which returns a line without its end, or None at the end.

    Ctrl-C discards the current message.
    """
    while True:
        try:
            line = read_line("> ")
            if line is None:
                return
            if line.strip() != _QUOTES:
                typed = ChatInput(line)
            else:
                block = []
                while (inner := read_line(". ")) is not None and inner.strip() != _QUOTES:
                    block.append(inner)
                typed = ChatInput("\n".join(block), block=True)
        except KeyboardInterrupt:  # as a shell does
            print(file=sys.stderr)
            continue
        yield typed


def _read_pipe(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _read_terminal(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print(file=sys.stderr)
        return None


@contextmanager
def _line_editing() -> Iterator[None]:
    try:
        import readline
    except ImportError:  # some builds of Python lack it
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = state / "flowspec" / "chat-history"
    readline.set_history_length(1000)
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)
