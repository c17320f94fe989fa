"""``flowspec worker``: a verification device as a service, the program behind flowspec-verify@.service.

Knows its options.  Does not know what a stage does (``runtime.worker``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path, typer.Option("--config", metavar="FILE", help="Its configuration, as TOML.")]
KeyFileOption = Annotated[Path | None, typer.Option(
    "--key-file", metavar="F", show_default=False,
    help="Where the configuration's key_file is to be found instead: a service's credential.")]


def worker(
    config: ConfigOption,
    key_file: KeyFileOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what happens, on stderr.")] = False,
) -> None:
    """Be one stage of a cluster, until SIGTERM: hold a part of the model, and compute what comes in.

    It waits for a draft device (flowspec draft), and for another when that one is gone.  systemd is told
    when the part is loaded, and that the loop goes on.

    Examples:

      flowspec worker --config /opt/flowspec/current/etc/verify-1.toml
    """
    from flowspec_edge.runtime.notify import Notifier
    from flowspec_edge.runtime.worker import serve

    changes = {"key_file": str(key_file)} if key_file else {}
    raise typer.Exit(serve(config, verbose, changes, Notifier(os.environ)))
