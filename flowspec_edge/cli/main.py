"""The ``flowspec`` command: its groups, exit codes, and the one line that an error becomes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import flowspec_edge
from flowspec_edge.cli.bench import commands as bench
from flowspec_edge.cli.boards import device, doctor, plan
from flowspec_edge.cli.common import listing
from flowspec_edge.cli.deploy import commands as deploy
from flowspec_edge.cli.deploy import keys
from flowspec_edge.cli.generate import chat, command, demo
from flowspec_edge.cli.models import commands as models
from flowspec_edge.cli.reproduce import command as reproduce
from flowspec_edge.cli.serve import command as serve
from flowspec_edge.cli.serve import daemons
from flowspec_edge.cli.sweep import commands as sweep
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.terminal import printable

_INTERRUPTED = 130  # 128 + SIGINT, the shells' convention

# Newer releases of typer bundle their own copy of click: take the class from what typer exports.
_ArgumentError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

app = typer.Typer(
    name="flowspec",
    epilog="Start with: flowspec demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flowspec-edge {flowspec_edge.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option(
        "--version", help="Print the release.", is_eager=True, callback=_print_version)] = False,
) -> None:
    """Pipelined tree speculative decoding for one large model over several small boards."""


app.command()(demo.demo)
app.command()(command.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command("up", short_help="The same as serve: flowspec up --local starts a cluster here and answers.")(
    serve.serve)
app.command()(daemons.worker)
app.command()(daemons.draft)
app.command()(listing.strategies)
app.command()(listing.profiles)
app.command()(doctor.doctor)
app.command()(plan.plan)
app.command()(reproduce.reproduce)
app.add_typer(bench.app, name="bench")
app.add_typer(deploy.app, name="deploy")
app.add_typer(device.app, name="device")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(sweep.app, name="sweep")


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # this process and the devices it starts
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except FlowspecError as error:
        return _fail(str(error), error.exit_code)
    except _ArgumentError as error:
        # A group without a command has already printed its help; its message is empty.
        text = error.format_message()
        return _fail(text, error.exit_code) if text else error.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe; the interpreter's flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED


def _fail(text: str, code: int) -> int:
    line = " ".join(text.split())
    print(f"flowspec: error: {printable(line)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
