"""The ``flowspec`` command: its groups, exit codes, and the one line that an error becomes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import typer

import flowspec_edge
from flowspec_edge.cli.common.lazy_group import LazyCommand, LazyGroup
from flowspec_edge.cli.common.streams import end_output, prepare_streams, raise_unsaved, refused_file
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.terminal import printable

_INTERRUPTED = 130  # 128 + SIGINT, the shells' convention

# Newer releases of typer bundle their own copy of click: take the class from what typer exports.
_ArgumentError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


_RUN, _MEASURE, _BOARDS = "Run a model", "Measure", "Boards"


# (command, an option that one may expect it to have): what to run instead.
_ELSEWHERE = {
    ("chat", "--cluster"): 'flowspec chat runs on this machine alone; ask a deployed cluster with: flowspec generate '
                           '--cluster FILE --chat "…", or on the page of its draft device'}


class Commands(LazyGroup):
    lazy: ClassVar = {
        "demo": LazyCommand(
            "generate.demo:demo",
            "Ask a question twice, plainly and with FlowSpec: the same words at two speeds.", _RUN),
        "generate": LazyCommand(
            "generate.command:generate",
            "Continue a text over a pipeline of stages, streaming it as it is accepted.", _RUN),
        "chat": LazyCommand(
            "generate.chat:chat",
            "Chat with a model over a pipeline of stages: answers stream, and caches keep the conversation.",
            _RUN),
        "serve": LazyCommand(
            "serve.command:serve", "Serve OpenAI's API, with a page that shows the cluster at work.", _RUN),
        "models": LazyCommand(
            "models.commands:app", "Models: list and fetch them, cut them into shards, train draft parts.",
            _RUN),
        "strategies": LazyCommand(
            "common.listing:strategies", "List the strategies, or the parameters of one.", _RUN),
        "profiles": LazyCommand(
            "common.listing:profiles", "List the profiles of devices and testbeds.", _MEASURE),
        "bench": LazyCommand("bench.commands:app", "Benchmarks.", _MEASURE),
        "reproduce": LazyCommand(
            "bench.reproduce:reproduce",
            "Reproduce tables and figures of the papers in virtual time: CSV, Markdown, LaTeX, PDF and SVG.",
            _MEASURE),
        "sweep": LazyCommand(
            "bench.sweep:sweep",
            "Measure tokens/s over the links, the stages, the drafts, or any parameter of a strategy.", _MEASURE),
        "record": LazyCommand(
            "bench.record:record",
            "Record a model's answers and drafts: then any cluster is measured in seconds, without weights.", _MEASURE),
        "plan": LazyCommand(
            "boards.plan:plan", "Split a model over boards: roles, layers, memory and expected speed.",
            _BOARDS),
        "doctor": LazyCommand(
            "boards.doctor:doctor",
            "Check a machine: release, Python, torch and its GPU, a real product, a real 4-bit kernel, "
            "memory.", _BOARDS),
        "device": LazyCommand("boards.device:app", "A board: measure it, show its profile.", _BOARDS),
        "deploy": LazyCommand(
            "deploy.commands:app", "Set up a cluster of boards, operate it, and remove it again.", _BOARDS),
        "keys": LazyCommand(
            "deploy.keys:app", "The keys that encrypt the links between boards.", _BOARDS),
        "worker": LazyCommand(
            "serve.daemons:worker",
            "Run one stage of a cluster until SIGTERM: the program of flowspec-verify@.service.", hidden=True),
        "draft": LazyCommand(
            "serve.daemons:draft",
            "Run the draft device of a cluster until SIGTERM: the program of flowspec-draft.service.",
            hidden=True),
    }


app = typer.Typer(
    cls=Commands,
    name="flowspec",
    epilog="Start with: flowspec demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"flowspec-edge {flowspec_edge.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option(
        "--version", help="Print the release.", is_eager=True, callback=_print_version)] = False,
) -> None:
    """Pipelined tree speculative decoding for one large model over several small boards."""


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # this process and the devices it starts
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        prepare_streams()
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
        sys.stdout.flush()
        raise_unsaved()
        return code if isinstance(code, int) else 0
    except FlowspecError as error:
        return _fail(str(error), error.exit_code)
    except _ArgumentError as error:
        # A group without a command has already printed its help; its message is empty.
        text = error.format_message()
        command = error.ctx.info_name if error.ctx else ""
        if hint := _ELSEWHERE.get((command, getattr(error, "option_name", ""))):
            text = f"{text}: {hint}"
        return _fail(text, error.exit_code) if text else error.exit_code
    except BrokenPipeError:  # the reader has closed the pipe
        end_output()
        return 1
    except OSError as error:
        if (reason := refused_file(error)) is None:
            raise
        return _fail(str(reason), reason.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED


def _fail(text: str, code: int) -> int:
    end_output()
    line = " ".join(text.split())
    print(f"flowspec: error: {printable(line)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
