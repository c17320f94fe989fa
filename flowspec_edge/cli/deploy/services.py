"""``flowspec deploy status | logs | restart | stop | start``: the services of a deployed cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.options import MOST_REPEATS
from flowspec_edge.cli.common.progress import asking_boards
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.terminal import plain

if TYPE_CHECKING:
    from flowspec_edge.boards.probe.facts import BoardStatus
    from flowspec_edge.boards.services.status import FleetStatus, Verb

ClusterOption = Annotated[Path, typer.Option("--cluster", help="The cluster's file.", metavar="FILE")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON object, not a table.")]
BoardsArgument = Annotated[list[str] | None, typer.Argument(
    metavar="[BOARD]...", help="Names in the cluster file.  Default: all boards.", show_default=False)]
CLUSTER = Path("cluster.toml")

_COLOURS = {"active": "green", "activating": "yellow", "reloading": "yellow", "failed": "red",
            "absent": "dim", "unknown": "red"}


def status(cluster: ClusterOption = CLUSTER, as_json: JsonOption = False) -> None:
    """Show the service of every board, and whether a token came through the pipeline lately.

    Exit code 1 unless all boards run the same release and it is ready.

    Examples:

      flowspec deploy status
      flowspec deploy status --cluster lab.toml --json
    """
    from flowspec_edge.boards.inventory import load_inventory

    inventory = load_inventory(cluster)
    from flowspec_edge.boards.services.status import look

    with asking_boards():
        fleet = look(inventory)
    if as_json:
        print(json.dumps(fleet.as_json(), indent=2))
    else:
        _show(inventory.cluster.name, fleet)
    if not fleet.ok:
        raise typer.Exit(1)


def logs(
    board: Annotated[str | None, typer.Argument(
        metavar="[BOARD]", help="A name in the cluster file.  Default: the draft device.",
        show_default=False)] = None,
    cluster: ClusterOption = CLUSTER,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines as they come.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=MOST_REPEATS,
                                      help="Last lines to print.")] = 50,
) -> None:
    """Show a service's journal.

    Examples:

      flowspec deploy logs
      flowspec deploy logs orin-3 -f
    """
    from flowspec_edge.boards.inventory import load_inventory

    inventory = load_inventory(cluster)
    from flowspec_edge.boards.services.status import boards_named, logs_command, look_at, look_at_draft

    named = boards_named(inventory, [board])[0] if board else None
    with asking_boards():
        status = look_at(inventory, named) if named else look_at_draft(inventory)
    device = boards_named(inventory, [status.name])[0]
    if status.error or status.current is None:
        raise FlowspecError(status.error or f"{device.name}: nothing is deployed there: flowspec deploy up")
    command = logs_command(inventory, device, status.current.unit, lines, follow)
    # No deadline: --follow runs until the user ends it; ssh ends when the board is silent.
    if code := subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        raise typer.Exit(code)


def restart(boards: BoardsArgument = None, cluster: ClusterOption = CLUSTER,
            as_json: JsonOption = False) -> None:
    """Restart services; without names, wait until a token has passed the new pipeline.

    Examples:

      flowspec deploy restart
      flowspec deploy restart orin-3
    """
    _control(cluster, "restart", boards or [], as_json)


def stop(boards: BoardsArgument = None, cluster: ClusterOption = CLUSTER,
         as_json: JsonOption = False) -> None:
    """Stop services, the draft device's first; they start again at a reboot.

    Examples:

      flowspec deploy stop
      flowspec deploy stop orin-3
    """
    _control(cluster, "stop", boards or [], as_json)


def start(boards: BoardsArgument = None, cluster: ClusterOption = CLUSTER,
          as_json: JsonOption = False) -> None:
    """Start services, the draft device's last, and wait for a token.

    Examples:

      flowspec deploy start
      flowspec deploy start orin-3
    """
    _control(cluster, "start", boards or [], as_json)


def _control(cluster: Path, verb: Verb, names: list[str], as_json: bool) -> None:
    from rich.console import Console

    from flowspec_edge.boards.inventory import load_inventory

    inventory = load_inventory(cluster)
    from flowspec_edge.boards.services.status import boards_named, control
    from flowspec_edge.cli.deploy.rollout_output import raise_failures

    board_names = [device.name for device in boards_named(inventory, names)]
    if repeated := [name for name in dict.fromkeys(board_names) if board_names.count(name) > 1]:
        raise UsageError(f"named twice: {', '.join(repeated)}; name each board once")
    past_tense = {"restart": "restarted", "stop": "stopped", "start": "started"}[verb]
    console = Console(highlight=False)

    def done(name: str, error: str) -> None:
        if not as_json:
            console.print(f"{name}: {past_tense}" if not error else f"[red]{name}: not {past_tense}[/red]",
                          soft_wrap=True)

    with asking_boards(f"{verb}: {', '.join(board_names)}"):
        failed = control(inventory, verb, names, done)
    if as_json:
        print(json.dumps({"ok": not failed, "boards": [{"name": name, "error": failed.get(name, "")}
                                                       for name in board_names]}, indent=2))
    elif failed:
        raise_failures([*failed.values()])
    if failed:
        raise typer.Exit(1)


def _show(name: str, fleet: FleetStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    columns = ["board", "role", "release", "service", "since", "restarts"]
    powered = any(board.watts is not None for board in fleet.boards)
    for column in [*columns, "power"] if powered else columns:
        table.add_column(column, justify="right" if column in ("restarts", "power") else "left")
    for board in fleet.boards:
        release = board.current
        power = "–" if board.watts is None else f"{board.watts:.1f} W"
        role = "" if release is None else "D0" if release.role == "draft" else f"V{release.stage}"
        table.add_row(plain(board.name), role, plain(release.id) if release else "", _state(board),
                      plain(_moment(board.since)),
                      str(board.restarts) if release else "",
                      *([power] if powered else []))
    console.print(table)
    for board in fleet.boards:
        if why := board.error or board.said:
            why = why.removeprefix(f"{board.name}: ")  # an error names the board itself
            console.print(f"[red]{plain(board.name)}[/red]: {plain(why)}", soft_wrap=True)
    came_through = "a token came through the pipeline lately"
    if fleet.ok:
        console.print(f"{plain(name)} is ready: {came_through}")
    elif fleet.ready:
        console.print(f"{plain(name)}: {came_through}, but {plain(fleet.disorder)}", soft_wrap=True)
    else:
        silent = f"no answer from {', '.join(fleet.unreached)}" if fleet.unreached else ""
        reason = "; ".join(filter(None, (silent, fleet.reason)))
        why = f": {plain(reason)}" if reason else ""
        console.print(f"{plain(name)} is not ready{why}", soft_wrap=True)


def _moment(since: str) -> str:
    """Return the time of systemd's "Sun 2026-11-22 01:24:54 UTC" without the weekday and the zone."""
    words = since.split()
    return " ".join(words[1:3]) if len(words) == 4 else since


def _state(board: BoardStatus) -> str:
    if board.error:
        return "[red]not reached[/red]"
    colour = _COLOURS.get(board.state, "yellow")
    return f"[{colour}]{plain(board.state)}[/{colour}]"
