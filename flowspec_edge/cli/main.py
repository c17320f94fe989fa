"""The ``flowspec`` command: the groups, and how an error ends it.

Knows exit codes and the one line an error becomes.  Does not know what the commands do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from flowspec_edge.cli import (
    bench,
    chat,
    demo,
    deploy,
    device,
    doctor,
    draft,
    generate,
    keys,
    listing,
    models,
    plan,
    serve,
    sweep,
    worker,
)
from flowspec_edge.errors import FlowspecError

_INTERRUPTED = 130  # 128 + SIGINT, as shells count

# typer brings its own copy of click in newer releases: take the class from what typer exports.
_ArgumentError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

app = typer.Typer(
    name="flowspec",
    help="Pipelined tree speculative decoding for one large model over several small boards.",
    epilog="Start with: flowspec demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command("up", short_help="The same as serve: flowspec up --local starts a cluster here and answers.")(
    serve.serve)
app.command()(worker.worker)
app.command()(draft.draft)
app.command()(listing.strategies)
app.command()(listing.profiles)
app.command()(doctor.doctor)
app.command()(plan.plan)
app.add_typer(bench.app, name="bench")
app.add_typer(deploy.app, name="deploy")
app.add_typer(device.app, name="device")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(sweep.app, name="sweep")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the console script passes it to the shell."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # this process and the devices it starts
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except FlowspecError as error:
        return _fail(str(error), error.exit_code)
    except _ArgumentError as error:
        # A group without a command has printed its help, and there is nothing to add.
        text = error.format_message()
        return _fail(text, error.exit_code) if text else error.exit_code
    except BrokenPipeError:
        # The reader has gone; give the interpreter's own flush at exit nothing to fail on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED


def _fail(text: str, code: int) -> int:
    line = " ".join(text.split())
    print(f"flowspec: error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
