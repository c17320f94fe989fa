"""``flowspec chat``: a conversation in the terminal.

Knows what is typed and what the commands in it do.  Does not know templates (``serving.conversation``)
or how an answer comes about.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from inspect import cleandoc
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.chat_screen import Screen
from flowspec_edge.cli.clusters import open_processes, timing
from flowspec_edge.cli.cut import dtype_of, stages_of
from flowspec_edge.cli.generate import given
from flowspec_edge.cli.measuring import require_runnable
from flowspec_edge.cli.options import (
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    EmulateOption,
    ModelOption,
    StagesOption,
    with_dataclasses,
)
from flowspec_edge.cli.torch_device import device_of
from flowspec_edge.errors import UsageError
from flowspec_edge.generation import choose_sampling
from flowspec_edge.modeldir import DEMO, resolve_model
from flowspec_edge.runtime.request import Request, Result, SharedCluster
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params
from flowspec_edge.strategies.registry import strategy_class

if TYPE_CHECKING:
    from flowspec_edge.runtime.clusters import Sharing
    from flowspec_edge.serving.conversation import Conversation
    from flowspec_edge.text import Tokenizer

_EXAMPLES = """
Examples:

  flowspec chat --model vicuna-7b-v1.5

  flowspec chat --model ./llama-shards --temperature 0.7 --system "Answer in one sentence."

  flowspec chat --chat-template vicuna --live

  echo "What is a pipeline?" | flowspec chat --model vicuna-7b-v1.5
"""
_QUOTES = '"""'
_REJOIN_S = 60.0  # for a lost stage to be back
_HELP = """/stats            figures of the last answer and of all, and what each stage did
/live             show, or no longer show, a line per stage while an answer comes
/history          what was said
/retry            ask the last question again
/undo             take the last exchange back
/reset [SYSTEM]   begin anew, with another system message if one is given
/help, /quit
Text between lines of \"\"\" is one message; Ctrl-C stops an answer, Ctrl-D ends the chat."""


@with_dataclasses(sampling=Sampling, params=Params)
def chat(
    context: typer.Context,
    model: ModelOption = DEMO,
    system: Annotated[str | None, typer.Option(
        "--system", help="The system's message.", metavar="TEXT", show_default=False)] = None,
    chat_template: ChatTemplateOption = None,
    strategy: Annotated[str, typer.Option("--strategy", help="See: flowspec strategies.")] = DEFAULT_STRATEGY,
    stages: StagesOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="The longest answer.")] = 1024,
    emulate: EmulateOption = None,
    live: Annotated[bool, typer.Option("--live", help="A line per stage while an answer comes.")] = False,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Talk with a model over a pipeline of stages: answers stream, and a turn reads in only what is new.

    /help names the commands within a chat.  What is typed may also be piped in, a message a line.
    """
    chosen = strategy_class(strategy)
    found = resolve_model(model)
    stages = stages_of(found, stages)
    when = timing("wall", "paper-7b", emulate)
    require_runnable([chosen.name], found, params, "wall", stages)
    device = device_of(device, found, dtype_of(found, dtype), processes=when.processes(stages))
    was_given = given(context, asdict(sampling))
    sampling, _ = choose_sampling(sampling, was_given, found)

    from flowspec_edge.runtime.coordinator import cache_rows
    from flowspec_edge.serving.conversation import Conversation
    from flowspec_edge.text import Tokenizer

    tokenizer = Tokenizer(found, chat_template)
    conversation = Conversation(tokenizer, found, answer_tokens, system)
    sharing: Sharing = {"at_once": 1, "cache_rows": cache_rows(found.max_positions, 1, params, stages),
                        "rejoin_within": _REJOIN_S}
    with (Screen() as screen,
          open_processes(when, found, stages, dtype, device=device, **sharing) as cluster,
          _typed() as messages):
        screen.live = live
        chatting = Chatting(conversation, tokenizer, screen, cluster, strategy, sampling, params,
                            any_seed="seed" not in was_given)
        screen.note(f"{found.name}, {chosen.name}, {stages} stages; /help for help")
        chatting.start()
        chatting.run(messages)


chat.__doc__ = f"{cleandoc(chat.__doc__ or '')}\n{_EXAMPLES}"


@dataclass(eq=False)
class Chatting:
    """A chat that goes on; ``any_seed``: every answer is drawn with a seed of its own."""

    conversation: Conversation
    tokenizer: Tokenizer
    screen: Screen
    cluster: SharedCluster
    strategy: str
    sampling: Sampling
    params: Params
    any_seed: bool
    results: list[Result] = field(default_factory=list)

    def start(self) -> None:
        """Have a token come through the stages, so that the first question does not wait for their start."""
        with self.screen.working("starting the stages"):
            self.cluster.generate(Request([0], self.strategy, 1, params=self.params))

    def run(self, messages: Iterator[Typed]) -> None:
        """Until there are no more, or /quit."""
        for typed in messages:
            name, _, rest = typed.text.strip().partition(" ")
            if not name:
                continue
            try:
                if typed.block or not name.startswith("/"):
                    self.answer(typed.text)
                elif name == "/quit":
                    return
                else:
                    self._obey(name, rest.strip())
            except UsageError as error:
                self.screen.note(str(error))

    def answer(self, text: str) -> None:
        """Ask, and show what comes."""
        from flowspec_edge.text import TextStream

        question = self.conversation.ask(text)
        if question.left_out:
            self.screen.note(f"[the context is full: the model no longer sees the first {question.left_out} "
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
        with _ctrl_c(ticket.cancel):
            self.cluster.serve(lambda: ticket.done)
        result = ticket.result()
        stream.close()
        self.screen.end_line()
        if result.finish_reason == "cancelled":
            self.screen.note("[stopped]")
        elif result.finish_reason == "length":
            self.screen.note(f"[the answer was cut off after {question.limit} tokens]")
        self.results.append(result)
        self.conversation.answered(text, "".join(pieces))

    def _obey(self, name: str, rest: str) -> None:
        commands: Mapping[str, Callable[[str], None]] = {
            "/help": lambda _: self.screen.note(_HELP), "/stats": lambda _: self.screen.stats(self.results),
            "/live": lambda _: self._toggle_live(), "/history": lambda _: self._show_history(),
            "/retry": lambda _: self.answer(self._take_back()), "/undo": lambda _: self._undo(),
            "/reset": lambda system: self.conversation.reset(system or None)}
        if name not in commands:
            raise UsageError(f"there is no {name}; /help names what there is, and text between lines of "
                             f"{_QUOTES} is never a command")
        commands[name](rest)

    def _toggle_live(self) -> None:
        self.screen.live = not self.screen.live
        self.screen.note(f"[lines of the stages {'on' if self.screen.live else 'off'}]")

    def _show_history(self) -> None:
        for message in self.conversation.messages:
            self.screen.note(f"{message.role}: {message.content}")

    def _undo(self) -> None:
        self.screen.note(f"[taken back: {self._take_back()}]")

    def _take_back(self) -> str:
        question = self.conversation.undo()
        if question is None:
            raise UsageError("nothing has been said yet")
        return question


@contextmanager
def _ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C stops the answer, a second one the program."""
    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Typed:
    """A line, which may be a command; or the lines of a block, which are what they are."""

    text: str
    block: bool = False


@contextmanager
def _typed() -> Iterator[Iterator[Typed]]:
    """Messages: lines, or what is between lines of three quotes; at a terminal they can be edited."""
    with ExitStack() as undo:
        if sys.stdin.isatty():
            undo.enter_context(_remembered())
        yield _messages(_asked if sys.stdin.isatty() else _piped)


def _messages(read: Callable[[str], str | None]) -> Iterator[Typed]:
    """``read`` gives a line without its end, or None at the end of all; Ctrl-C gives up what was begun."""
    while True:
        try:
            line = read("> ")
            if line is None:
                return
            if line.strip() != _QUOTES:
                typed = Typed(line)
            else:
                block = []
                while (inner := read(". ")) is not None and inner.strip() != _QUOTES:
                    block.append(inner)
                typed = Typed("\n".join(block), block=True)
        except KeyboardInterrupt:  # as a shell does
            print(file=sys.stderr)
            continue
        yield typed


def _piped(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _asked(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print(file=sys.stderr)
        return None


@contextmanager
def _remembered() -> Iterator[None]:
    """Lines can be edited and recalled, those of earlier chats, too."""
    try:
        import readline
    except ImportError:  # a Python without it still chats
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
