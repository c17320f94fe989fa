"""``flowspec deploy``: init, plan, up, rollback, down; the services' commands are in ``services``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.deploy import services
from flowspec_edge.cli.deploy.services import CLUSTER, ClusterOption, JsonOption
from flowspec_edge.errors import UsageError
from flowspec_edge.model.opened import DEMO
from flowspec_edge.util.terminal import did_you_mean, printable

if TYPE_CHECKING:
    from flowspec_edge.boards.doctor.discover import DiscoveredBoard

app = typer.Typer(help="Set up a cluster of boards, operate it, and remove it again.", no_args_is_help=True)




def init(
    hosts: Annotated[list[str], typer.Argument(
        metavar="[USER@]HOST[:PORT]...", help="The boards: IPv4 addresses, or names that all boards know.")],
    user: Annotated[str, typer.Option("--user", help="The user for ssh.  Default: ssh's choice.",
                                      metavar="USER", show_default=False)] = "",
    port: Annotated[int | None, typer.Option(
        "--port", min=1, max=65535, help="Port of sshd.  Default: ssh's choice.", metavar="PORT",
        show_default=False)] = None,
    key: Annotated[Path | None, typer.Option(
        "--key", help="The private key for ssh.  Default: ssh's choice.", metavar="FILE",
        show_default=False)] = None,
    ssh_config: Annotated[Path | None, typer.Option(
        "--ssh-config", metavar="FILE", show_default=False,
        help="The configuration file for ssh (its option -F).  Default: your own.")] = None,
    model: Annotated[str, typer.Option(
        "--model", help="What the cluster is to run: a name of flowspec models list, a GGUF file, or a directory.",
        metavar="MODEL")] = DEMO,
    power_mode: Annotated[str, typer.Option(
        "--power-mode", help="The boards' power mode, by its name in /etc/nvpmodel.conf.  Default: unchanged.",
        metavar="NAME", show_default=False)] = "",
    all_boards: Annotated[bool, typer.Option(
        "--all-boards", help="Give every board a part; the one with the most memory drafts.  Default: the "
                             "planner decides, and may leave boards out.")] = False,
    image: Annotated[Path | None, typer.Option(
        "--image", help="The boards run this image, an archive of docker save, and need Docker in place of torch.",
        metavar="FILE", show_default=False)] = None,
    out: Annotated[Path, typer.Option("--out", help="File to write.", metavar="FILE")] = Path("cluster.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON object.")] = False,
) -> None:
    """Inspect boards over ssh, and write a commented cluster.toml for them.

    Nothing is changed on the boards, and only their own Python is needed there.

    Examples:

      flowspec deploy init orin-0 orin-1 orin-2 orin-3
      flowspec deploy init 10.0.0.10 10.0.0.11 --user ubuntu --key ~/.ssh/boards --out lab.toml
      flowspec deploy init orin-0 orin-1 --power-mode MAXN_SUPER --all-boards
    """
    _require_model(model, out)
    from flowspec_edge.boards.doctor.discover import (
        NotFound,
        discover,
        parse_hosts,
        render_cluster_toml,
        require_mode,
    )
    from flowspec_edge.cli.common.progress import asking_boards
    from flowspec_edge.cli.deploy.rollout_output import raise_failures
    from flowspec_edge.util.files import check_writable, write_output

    for path in (key, ssh_config):
        if path is not None and not path.is_file():
            raise UsageError(f"no file {path}")
    boards = parse_hosts(hosts, user, port, str(key.absolute()) if key else "",
                     str(ssh_config.absolute()) if ssh_config else "", str(image or ""))
    if out.exists() and not force:
        raise UsageError(f"{out} is there already: give another name as --out, or --force to replace it")
    check_writable(out)
    try:
        with asking_boards() as show:
            discovered = discover(boards, lambda name: show(f"{name} has answered"))
    except NotFound as error:
        if not as_json:
            _print_boards(error.answered)
        raise_failures([*map(str, error.silent)], f"{out} is not written", "boards do not answer")
    require_mode(discovered, power_mode)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", out.stem).strip("-_.")[:63] or "cluster"
    cluster_settings = {key: value for key, value in (
        ("model", model), ("power_mode", power_mode), ("runtime", "image" if image else ""),
        ("image", str(image.absolute()) if image else "")) if value}
    write_output(out, render_cluster_toml(discovered, name, str(out), boards.cluster.ssh_config, cluster_settings,
                                          all_boards))
    if as_json:
        print(json.dumps({"out": str(out), "boards": [board.as_json() for board in discovered]}, indent=2))
        return
    _print_boards(discovered)
    print(f"{out} is written: look through it, then: flowspec doctor --cluster {out}")


def _require_model(model: str, cluster: Path) -> None:
    from flowspec_edge.boards.inventory import beside
    from flowspec_edge.model.catalogue import find_known_model, known_models
    from flowspec_edge.model.opened import shipped_models

    if model not in shipped_models() and not find_known_model(model) and not beside(cluster, model).is_dir():
        suggestion = did_you_mean(model, [*shipped_models(), *known_models()]).rstrip()
        raise UsageError(f"no model {model!r}: not a directory beside {cluster}, and no name in: flowspec models list"
                         + (f"; {suggestion}" if suggestion else ""))


def _print_boards(boards: Sequence[DiscoveredBoard]) -> None:
    from flowspec_edge.boards.doctor.discover import describe_software

    for board in boards:
        print(printable(f"{board.device.name}: {board.board.title or board.arch}; {describe_software(board)}"))
        for fault in board.faults:
            print(f"  → {fault}")


def change(
    settings: Annotated[list[str], typer.Argument(
        metavar="KEY=VALUE...", help="Keys of the file, such as model=qwen3-8b; KEY= leaves the key out.")],
    board: Annotated[list[str] | None, typer.Option(
        "--board", help="Change this board's own entry; may be repeated.", metavar="NAME",
        show_default=False)] = None,
    cluster: ClusterOption = CLUSTER,
) -> None:
    """Change settings in the cluster file; its comments stay, and a wrong value changes nothing.

    A key that only boards have, such as role, is set for all boards, unless --board names some.

    Examples:

      flowspec deploy set model=qwen3-8b dtype=int4 role=auto
      flowspec deploy set power_mode=MAXN_SUPER
      flowspec deploy set torch_device=cpu --board orin-2
    """
    from flowspec_edge.boards.inventory import with_settings
    from flowspec_edge.util.files import write_output

    pairs = [setting.partition("=") for setting in settings]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise UsageError(f"{key or '='!r} is not KEY=VALUE, such as model=qwen3-8b")
    new_settings = {key.strip(): value.strip() for key, _, value in pairs}
    if new_settings.get("model"):
        _require_model(new_settings["model"], cluster)
    write_output(cluster, with_settings(cluster, new_settings, board or []))
    print(f"{cluster} is changed: see flowspec deploy plan --cluster {cluster}")


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
    from flowspec_edge.boards.inventory import load_inventory

    inventory = load_inventory(cluster)
    from flowspec_edge.boards.deploy.rollback import roll_back
    from flowspec_edge.cli.deploy.rollout_output import changing, print_report

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
    from flowspec_edge.boards.inventory import beside, load_inventory

    inventory = load_inventory(cluster)
    from flowspec_edge.boards.deploy.rollback import take_down
    from flowspec_edge.cli.deploy.rollout_output import changing, print_report

    with changing(cluster, inventory.cluster.name, as_json) as watch:
        report = take_down(inventory, beside(cluster, inventory.cluster.keys), purge, watch)
    print_report(report, "taken down", as_json)


def _roll_out(cluster: Path, as_json: bool, dry_run: bool = False) -> None:
    from flowspec_edge.boards.inventory import load_inventory

    inventory = load_inventory(cluster)
    from flowspec_edge.boards.deploy.resolve import resolve_deployment
    from flowspec_edge.cli.deploy.rollout_output import changing, print_report, show_roles, watch_rollout

    deployment = resolve_deployment(inventory, cluster)  # errors in the file come before torch is imported
    from flowspec_edge.boards.deploy.rollout import Rollout

    if not as_json:
        show_roles(deployment)
    if dry_run:
        with watch_rollout(as_json) as watch:
            report = Rollout(deployment, watch).plan()
    else:
        with changing(cluster, deployment.cluster.name, as_json) as watch:
            report = Rollout(deployment, watch).up()
    print_report(report, "deployed", as_json, dry_run)


app.command("set")(change)
for _command in (init, plan, up, services.status, services.logs, services.restart, services.stop,
                 services.start, rollback, down):
    app.command()(_command)
