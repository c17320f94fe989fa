"""``flowspec deploy``: a cluster of boards, from bare to running and back.

Knows the group's commands.  Does not know what they do.
"""

from __future__ import annotations

import typer

from flowspec_edge.cli import deploy_init

app = typer.Typer(help="A cluster of boards: from bare to running, and back.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """A cluster of boards: from bare to running, and back."""


app.command()(deploy_init.init)
