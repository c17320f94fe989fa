"""``flowspec deploy``: a cluster of boards, from bare to running and back.

Knows the group's commands.  Does not know what they do.
"""

from __future__ import annotations

import typer

from flowspec_edge.cli import deploy_init, deploy_rollout, deploy_services

app = typer.Typer(help="A cluster of boards: from bare to running, and back.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """A cluster of boards: from bare to running, and back."""


for command in (deploy_init.init, deploy_rollout.plan, deploy_rollout.up, deploy_services.status,
                deploy_services.logs, deploy_services.restart, deploy_services.stop, deploy_services.start,
                deploy_rollout.rollback, deploy_rollout.down):
    app.command()(command)
