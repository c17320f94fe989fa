"""``flowspec deploy``: init, plan, up, rollback, down; the services' commands are in ``services``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.deploy import services
from flowspec_edge.cli.deploy.services import CLUSTER, ClusterOption, JsonOption
from flowspec_edge.errors import UsageError
from flowspec_edge.util.terminal import printable

app = typer.Typer(help="A cluster of boards: from bare to running, and back.", no_args_is_help=True)




def init(
    hosts: Annotated[list[str], typer.Argument(
        metavar="[USER@]HOST[:PORT]...", help="The boards: IPv4 addresses, or names that all boards know.")],
    user: Annotated[str, typer.Option("--user", help="The user for ssh; default: ssh's choice.",
                                      metavar="USER", show_default=False)] = "",
    port: Annotated[int | None, typer.Option(
        "--port", min=1, max=65535, help="Port of sshd; default: ssh's choice.", metavar="PORT",
        show_default=False)] = None,
    key: Annotated[Path | None, typer.Option(
        "--key", help="The private key for ssh; default: ssh's choice.", metavar="FILE",
        show_default=False)] = None,
    ssh_config: Annotated[Path | None, typer.Option(
        "--ssh-config", help="For ssh's -F; default: your own.", metavar="FILE", show_default=False)] = None,
    out: Annotated[Path, typer.Option("--out", help="File to write.", metavar="FILE")] = Path("cluster.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON object.")] = False,
) -> None:
    """Inspect boards over ssh, and write a commented cluster.toml for them.

    Nothing is changed on the boards, and only their own Python is needed there.

    Examples:

      flowspec deploy init orin-0 orin-1 orin-2 orin-3
      flowspec deploy init 10.0.0.10 10.0.0.11 --user ubuntu --key ~/.ssh/boards --out lab.toml
    """
    from rich.console import Console

    from flowspec_edge.fleet.doctor.discover import describe_torch, discover, parse_hosts, render_cluster_toml
    from flowspec_edge.util.files import check_writable, write_output

    if out.exists() and not force:
        raise UsageError(f"{out} is there already: give another name as --out, or --force to replace it")
    for given in (key, ssh_config):
        if given is not None and not given.is_file():
            raise UsageError(f"no file {given}")
    boards = parse_hosts(hosts, user, port, str(key.absolute()) if key else "",
                     str(ssh_config.absolute()) if ssh_config else "")
    check_writable(out)
    with Console(stderr=True).status("asking the boards") as status:
        found = discover(boards, lambda name: status.update(f"{name} has answered"))
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", out.stem).strip("-_.")[:63] or "cluster"
    write_output(out, render_cluster_toml(found, name, str(out), boards.cluster.ssh_config))
    if as_json:
        print(json.dumps({"out": str(out), "boards": [board.as_json() for board in found]}, indent=2))
        return
    for board in found:
        print(printable(f"{board.device.name}: {board.board.title or board.arch}; {describe_torch(board)}"))
        for fault in board.faults:
            print(f"  → {fault}")
    print(f"{out} is written: look through it, then: flowspec doctor --cluster {out}")


def plan(cluster: ClusterOption = CLUSTER, as_json: JsonOption = False) -> None:
    """Show what deploy up would change on each board; nothing is changed there.

    The model is sharded and wheels are downloaded on this machine, beside the cluster file, as by deploy up.

    Examples:

      flowspec deploy plan
      flowspec deploy plan --cluster lab.toml --json
    """
    _roll_out(cluster, as_json, dry_run=True)


def up(cluster: ClusterOption = CLUSTER, as_json: JsonOption = False) -> None:
    """Bring all boards to the state of the cluster file, and start the services; only differences change.

    It ends when a real token has passed the whole pipeline.  A release that does not become ready is rolled
    back automatically.  After any failure, the next run resumes.

    Examples:

      flowspec deploy up
      flowspec deploy up --cluster lab.toml --json
    """
    _roll_out(cluster, as_json)


def rollback(cluster: ClusterOption = CLUSTER, as_json: JsonOption = False) -> None:
    """Go back to the previous release on all boards; a second rollback undoes the first.

    Examples:

      flowspec deploy rollback --cluster lab.toml
    """
    from flowspec_edge.cli.deploy.rollout_output import changing, print_report
    from flowspec_edge.fleet.deploy.rollback import roll_back
    from flowspec_edge.fleet.inventory import load_inventory

    inventory = load_inventory(cluster)
    with changing(cluster, inventory.cluster.name, as_json) as watch:
        report = roll_back(inventory, watch)
    print_report(report, "rolled back", as_json)


def down(
    cluster: ClusterOption = CLUSTER,
    purge: Annotated[bool, typer.Option(
        "--purge", help="Remove everything: releases, shards, keys and the user.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop and disable the services on all boards; deploy up enables them again.

    Examples:

      flowspec deploy down
      flowspec deploy down --purge
    """
    from flowspec_edge.cli.deploy.rollout_output import changing, print_report
    from flowspec_edge.fleet.deploy.rollback import take_down
    from flowspec_edge.fleet.inventory import beside, load_inventory

    inventory = load_inventory(cluster)
    with changing(cluster, inventory.cluster.name, as_json) as watch:
        report = take_down(inventory, beside(cluster, inventory.cluster.keys), purge, watch)
    print_report(report, "taken down", as_json)


def _roll_out(cluster: Path, as_json: bool, dry_run: bool = False) -> None:
    from flowspec_edge.cli.deploy.rollout_output import changing, print_report, show_roles, watch_rollout
    from flowspec_edge.fleet.deploy.resolve import resolve_deployment
    from flowspec_edge.fleet.deploy.rollout import Rollout
    from flowspec_edge.fleet.inventory import load_inventory

    deployment = resolve_deployment(load_inventory(cluster), cluster)
    if not as_json:
        show_roles(deployment)
    if dry_run:
        with watch_rollout(as_json) as watch:
            report = Rollout(deployment, watch).plan()
    else:
        with changing(cluster, deployment.cluster.name, as_json) as watch:
            report = Rollout(deployment, watch).up()
    print_report(report, "deployed", as_json, dry_run)


for _command in (init, plan, up, services.status, services.logs, services.restart, services.stop,
                 services.start, rollback, down):
    app.command()(_command)
