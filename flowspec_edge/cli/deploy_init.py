"""``flowspec deploy init``: a first cluster.toml, from a look at the boards.

Knows its options.  Does not know how a board is looked at (``fleet.survey``).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.errors import UsageError


def init(
    hosts: Annotated[list[str], typer.Argument(
        metavar="[USER@]HOST[:PORT]...", help="The boards: IPv4 addresses, or names that all boards know.")],
    user: Annotated[str, typer.Option("--user", help="That ssh is to be; default: ssh's own choice.",
                                      metavar="USER", show_default=False)] = "",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Of sshd.", metavar="PORT")] = 22,
    key: Annotated[Path | None, typer.Option(
        "--key", help="The private key that lets you in; default: ssh's own choice.", metavar="FILE",
        show_default=False)] = None,
    ssh_config: Annotated[Path | None, typer.Option(
        "--ssh-config", help="For ssh's -F; default: your own.", metavar="FILE", show_default=False)] = None,
    out: Annotated[Path, typer.Option("--out", help="Where it goes.", metavar="FILE")] = Path("cluster.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as a JSON object.")] = False,
) -> None:
    """Look at boards over ssh, and write a cluster.toml for them, with comments.

    Nothing is changed on the boards, and nothing of flowspec need be there: their own Python answers.

    Examples:

      flowspec deploy init orin-0 orin-1 orin-2 orin-3

      flowspec deploy init 10.0.0.10 10.0.0.11 --user ubuntu --key ~/.ssh/boards --out lab.toml
    """
    from rich.console import Console

    from flowspec_edge.bench.output import check_writable, write
    from flowspec_edge.fleet.survey import survey, targets
    from flowspec_edge.fleet.survey_toml import render

    if out.exists() and not force:
        raise UsageError(f"{out} is there already: give another name as --out, or --force to replace it")
    for given in (key, ssh_config):
        if given is not None and not given.is_file():
            raise UsageError(f"no file {given}")
    boards = targets(hosts, user, port, str(key.absolute()) if key else "",
                     str(ssh_config.absolute()) if ssh_config else "")
    check_writable(out)
    with Console(stderr=True).status("asking the boards") as status:
        found = survey(boards, lambda name: status.update(f"{name} has answered"))
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", out.stem).strip("-_.")[:63] or "cluster"
    write(out, render(found, name, str(out), boards.cluster.ssh_config))
    if as_json:
        print(json.dumps({"out": str(out), "boards": [board.as_json() for board in found]}, indent=2))
        return
    for board in found:
        print(f"{board.device.name}: {board.board.title or board.arch}")
    print(f"{out} is written: look through it, then: flowspec deploy plan --cluster {out}")
