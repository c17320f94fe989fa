"""``flowspec keys``: the key pairs that encrypt the links of a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.errors import FlowspecError

if TYPE_CHECKING:
    from flowspec_edge.boards.services.keys import BoardKeys

app = typer.Typer(name="keys", help="The keys that encrypt the links between boards.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]
ClusterOption = Annotated[Path, typer.Option("--cluster", metavar="FILE", help="The boards: a cluster.toml.")]


@app.callback()
def keys() -> None:
    """Group the commands about the boards' key pairs; a private key never leaves its board."""


@app.command()
def show(
    cluster: ClusterOption,
    as_json: JsonOption = False,
) -> None:
    """Show every board's public key, and compare it with the one recorded here.

    Examples:

      flowspec keys show --cluster cluster.toml
    """
    from flowspec_edge.boards.inventory import beside, load_inventory

    inventory = load_inventory(cluster)
    from flowspec_edge.boards.commands import python_for
    from flowspec_edge.boards.services.keys import public_keys, recorded
    from flowspec_edge.cli.common.progress import asking_boards

    directory, devices = beside(cluster, inventory.cluster.keys), inventory.device
    recorded_keys = recorded(devices, directory)
    with asking_boards():
        boards = public_keys(inventory, devices, {d.name: python_for(inventory, d) for d in devices}, directory)
    if as_json:
        print(json.dumps({"boards": [
            {"name": board.name, "public": next(iter(board.publics), None), "recorded": recorded_keys.get(board.name),
             "error": board.error or None} for board in boards]}))
    else:
        for board in boards:
            print(_line(board, board.name in recorded_keys))
    if any(board.error for board in boards):
        raise typer.Exit(1)


@app.command()
def rotate(
    cluster: ClusterOption,
    as_json: JsonOption = False,
) -> None:
    """Replace the key pairs of all boards of a running cluster, and restart the services.

    Boards generate their own pairs.  It ends when a token has passed the pipeline with the new keys, and the
    former pairs are removed; if no token comes, the release before runs again, with the former pairs.  After a
    failure or an interruption, the same command goes on.

    Examples:

      flowspec keys rotate --cluster cluster.toml
    """
    from flowspec_edge.boards.inventory import load_inventory

    inventory = load_inventory(cluster)
    from flowspec_edge.boards.deploy.resolve import resolve_deployment

    deployment = resolve_deployment(inventory, cluster)  # errors in the file come before torch is imported
    from flowspec_edge.boards.deploy.rollout import Rollout
    from flowspec_edge.boards.services.keys import recorded
    from flowspec_edge.boards.services.status import look
    from flowspec_edge.cli.deploy.rollout_output import changing, raise_failures

    inventory = deployment.decided
    if not any(board.current or board.error for board in look(inventory).boards):
        raise FlowspecError("nothing is deployed, so no board has a key to replace: flowspec deploy up")
    with changing(cluster, inventory.cluster.name, as_json) as watch:
        report = Rollout(deployment, watch).up(rotate=True)
    if not report.ok:
        raise_failures(report.failures, "no board was touched" if report.problems else report.after_failure)
    publics = recorded(deployment.boards, deployment.keys)
    if as_json:
        print(json.dumps({"ok": True, "boards": [{"name": name, "public": public}
                                                 for name, public in publics.items()]}))
    else:
        print(f"{len(publics)} boards have new keys, and a token came through the pipeline with them")


def _line(board: BoardKeys, is_recorded: bool) -> str:
    if board.error:
        return f"✗ {board.error}"
    mark, note = ("✓", "") if is_recorded else ("·", "  not recorded yet")
    return f"{mark} {board.name}  {board.publics[0]}{note}"
