"""``flowspec device``: profile a board, answer a link test, show a profile, compare kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowspec_edge.cli.boards.kernels import kernels
from flowspec_edge.cli.common.options import MOST_SECONDS, Dtype, ModelOption, ThreadsOption, not_nan
from flowspec_edge.cli.common.progress import done_of, plain_lines
from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import DEMO

if TYPE_CHECKING:
    from flowspec_edge.config import Profile

Device = Literal["cpu", "cuda"]

PEER_PORT = 7779
_PHASES = {"link": 0.02, "memory": 0.03, "loopback": 0.1, "stages": 0.55, "draft device": 0.3}  # of the time

app = typer.Typer(help="A board: measure it, show its profile.", no_args_is_help=True)



app.command()(kernels)


@app.command()
def profile(
    out: Annotated[Path | None, typer.Option(
        "--out", help="Write the profile to this file, which names it.  Default: no file.",
        metavar="NAME.toml")] = None,
    model: ModelOption = DEMO,
    peer: Annotated[str | None, typer.Option(
        "--peer", help="Measure the link to a device that runs `flowspec device peer`.  Default: loopback.",
        metavar="HOST:PORT")] = None,
    device: Annotated[Device, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    dtype: Annotated[Dtype | None, typer.Option(
        "--dtype", help="Element type of weights and caches.  [default: fp32 on a CPU, fp16 on a GPU]",
        show_default=False)] = None,
    threads: ThreadsOption = 0,
    quick: Annotated[bool, typer.Option("--quick", help="20 seconds instead of one or two minutes.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON, not a table.")] = False,
) -> None:
    """Measure this machine, for virtual time, emulation and the planner.

    Measured are stage times over rows and cached tokens, draft passes, lm_head, memory, and the link.  Stop
    other work first, and set the board's final power mode.

    Examples:

      flowspec device profile --out profiles/my-board.toml
      flowspec device profile --model llama-2-7b --device cuda --peer 10.0.0.2:7779 --out orin-1.toml
    """
    from datetime import date

    from flowspec_edge.model.modeldir import resolve_model
    from flowspec_edge.util.files import check_writable, write_output

    if out is not None:
        if out.suffix != ".toml":
            raise UsageError(f"{out}: a profile's file ends in .toml")
        if out.exists() and not force:
            raise UsageError(f"{out} exists already; give another name, or replace it with --force")
        check_writable(out)
    found = resolve_model(model)
    address = parse_peer(peer) if peer else None

    from flowspec_edge.fleet.profiling.profile import QUICK, Effort, ProfileOptions, measure_profile
    from flowspec_edge.fleet.profiling.profile_toml import render

    chosen: Dtype = dtype or ("fp32" if device == "cpu" else "fp16")
    wish = ProfileOptions(out.stem if out else found.name, found, chosen, device, threads, address,
                          str(date.today()))
    with _Bar() as bar:
        measured = measure_profile(wish, QUICK if quick else Effort(), bar.report)
    if out is not None:
        write_output(out, render(measured.profile))
    if as_json:
        print(measured.profile.model_dump_json(indent=2))
        return
    _show(measured.profile)
    worst = max(map(abs, measured.relative_errors))
    middle = sorted(map(abs, measured.relative_errors))[len(measured.relative_errors) // 2]
    print(f"\nThe stage's curve is off by {middle:.0%} in the middle of the cases measured, "
          f"by {worst:.0%} in the worst.")
    if out is not None:
        print(f"Written to {out}; use it with --profile {out}")


@app.command("peer")
def peer_command(
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, help="0: any free port.")] = PEER_PORT,
    seconds: Annotated[float | None, typer.Option(
        "--for", min=0.1, max=MOST_SECONDS, callback=not_nan,
        help="Stop after so many seconds.", metavar="SECONDS", show_default=False)] = None,
) -> None:
    """Answer another device's link test, until interrupted.

    Any client of the port can make this device receive and discard data, nothing else.

    Examples:

      flowspec device peer --for 600
    """
    import sys

    from flowspec_edge.fleet.network.linktest import serve_link

    def ready(chosen: int) -> None:
        print(f"listening on {host}:{chosen}; on the other device run: "
              f"flowspec device profile --peer THIS-HOST:{chosen}", file=sys.stderr, flush=True)

    serve_link(host, port, seconds, ready=ready)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A profile's name, or a TOML file.", metavar="NAME")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show a profile: its times, and the source of its figures.

    Examples:

      flowspec device show orin-nano-8gb
    """
    from flowspec_edge.config import load_profile

    found = load_profile(name)
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        _show(found)


def parse_peer(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"--peer {text!r}: give HOST:PORT, such as 10.0.0.2:{PEER_PORT}")
    return host.strip("[]"), int(port)


def _show(profile: Profile) -> None:
    from rich.console import Console

    from flowspec_edge.cli.boards.profile_table import show_profile

    show_profile(Console(), profile)


class _Bar:
    """A progress bar over the phases of a measurement, if stderr is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:13}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=1.0)
        self._lines = plain_lines(self._line)

    def _line(self, seconds: float) -> str:
        task = self._progress.tasks[0]
        return f"profile: {task.description}, {done_of(100 * task.completed, 100, seconds, '%')}"

    def report(self, phase: str, share: float) -> None:
        names = list(_PHASES)
        before = sum(_PHASES[name] for name in names[:names.index(phase)])
        self._progress.update(self._task, description=phase, completed=before + share * _PHASES[phase])

    def __enter__(self) -> _Bar:
        self._progress.start()
        self._lines.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lines.__exit__(None, None, None)
        self._progress.stop()
