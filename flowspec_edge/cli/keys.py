"""``flowspec keys``: the key pairs that encrypt the links of a cluster.

Knows how they are shown.  Does not know how boards are asked (``fleet.board_keys``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flowspec_edge.fleet.board_keys import BoardKey

app = typer.Typer(name="keys", help="The keys that encrypt the links between boards.", no_args_is_help=True)

ClusterOption = Annotated[Path, typer.Option("--cluster", metavar="FILE", help="The boards: a cluster.toml.")]


@app.callback()
def keys() -> None:
    """Each board has a key pair of its own, whose private half never leaves it."""


@app.command()
def show(
    cluster: ClusterOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Ask every board for its public key, and compare it with the one that is recorded here.

    Examples:

      flowspec keys show --cluster cluster.toml
    """
    from flowspec_edge.fleet.board_keys import recorded, shown
    from flowspec_edge.fleet.inventory import load_inventory
    from flowspec_edge.fleet.ssh import python_for

    inventory = load_inventory(cluster)
    directory, devices = cluster.absolute().parent / inventory.cluster.keys, inventory.device
    known = recorded(devices, directory)
    boards = shown(inventory, devices, {d.name: python_for(inventory, d) for d in devices}, directory)
    if as_json:
        print(json.dumps({"boards": [
            {"name": board.name, "public": board.public or None, "recorded": known.get(board.name),
             "error": board.error or None} for board in boards]}))
    else:
        for board in boards:
            print(_line(board, board.name in known))
    if any(board.error for board in boards):
        raise typer.Exit(1)


def _line(board: BoardKey, is_recorded: bool) -> str:
    if board.error:
        return f"✗ {board.error}"
    mark, note = ("✓", "") if is_recorded else ("·", "  not recorded yet")
    return f"{mark} {board.name}  {board.public}{note}"
