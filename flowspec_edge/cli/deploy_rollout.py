"""``flowspec deploy plan | up | rollback | down``: a release onto the boards, and back.

Knows their options.  Does not know the order of things (``fleet.rollout``) nor how they are shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.deploy_services import CLUSTER, ClusterOption, JsonOption


def plan(cluster: ClusterOption = CLUSTER, as_json: JsonOption = False) -> None:
    """Show what deploy up would change on each board; boards are only looked at.

    The model is cut and wheels are gathered here, beside the cluster file, as deploy up would.

    Examples:

      flowspec deploy plan

      flowspec deploy plan --cluster lab.toml --json
    """
    _roll_out(cluster, as_json, dry_run=True)


def up(cluster: ClusterOption = CLUSTER, as_json: JsonOption = False) -> None:
    """Bring all boards to what the cluster file says, and start the services; nothing that is right changes.

    It ends when a real token has come through the whole pipeline.  A release that does not become ready is
    taken back by itself.  Whatever ends it, the next run goes on from there.

    Examples:

      flowspec deploy up

      flowspec deploy up --cluster lab.toml --json
    """
    _roll_out(cluster, as_json)


def rollback(cluster: ClusterOption = CLUSTER, as_json: JsonOption = False) -> None:
    """Go back to the release before the one that runs, on all boards; once more, and it is undone.

    Examples:

      flowspec deploy rollback --cluster lab.toml
    """
    from flowspec_edge.cli.deploy_show import conclude, watching
    from flowspec_edge.fleet.inventory import load_inventory
    from flowspec_edge.fleet.rollback import roll_back

    inventory = load_inventory(cluster)
    with watching(as_json) as watch:
        report = roll_back(inventory, watch)
    conclude(report, "rolled back", as_json)


def down(
    cluster: ClusterOption = CLUSTER,
    purge: Annotated[bool, typer.Option(
        "--purge", help="Leave nothing: releases, shards, keys and the user go, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop the services on all boards, for good; deploy up brings them back.

    Examples:

      flowspec deploy down

      flowspec deploy down --purge
    """
    from flowspec_edge.cli.deploy_show import conclude, watching
    from flowspec_edge.fleet.inventory import beside, load_inventory
    from flowspec_edge.fleet.rollback import take_down

    inventory = load_inventory(cluster)
    with watching(as_json) as watch:
        report = take_down(inventory, beside(cluster, inventory.cluster.keys), purge, watch)
    conclude(report, "taken down", as_json)


def _roll_out(cluster: Path, as_json: bool, dry_run: bool = False) -> None:
    from flowspec_edge.cli.deploy_show import conclude, show_decision, watching
    from flowspec_edge.fleet.deployment import resolve_deployment
    from flowspec_edge.fleet.inventory import load_inventory
    from flowspec_edge.fleet.rollout import Rollout

    deployment = resolve_deployment(load_inventory(cluster), cluster)
    if not as_json:
        show_decision(deployment)
    with watching(as_json) as watch:
        rollout = Rollout(deployment, watch)
        report = rollout.plan() if dry_run else rollout.up()
    conclude(report, "deployed", as_json, dry_run)
