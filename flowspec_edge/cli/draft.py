"""``flowspec draft``: the draft device as a service, the program behind flowspec-draft.service.

Knows how its configuration becomes a served model.  Does not know what answers clients (``cli.service``).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.cut import stages_of
from flowspec_edge.cli.measuring import require_runnable
from flowspec_edge.cli.service import Service
from flowspec_edge.cli.worker import ConfigOption, KeyFileOption
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import resolve_model
from flowspec_edge.runtime.draftconfig import DraftConfig
from flowspec_edge.runtime.notify import Notifier
from flowspec_edge.strategies.params import Params

if TYPE_CHECKING:
    from flowspec_edge.runtime.clusters import Sharing
    from flowspec_edge.runtime.request import SharedCluster

_ANSWER_TOKENS = 1024


def draft(
    config: ConfigOption,
    key_file: KeyFileOption = None,
    api_key_file: Annotated[Path | None, typer.Option(
        "--api-key-file", metavar="F", show_default=False,
        help="The same of its api_key_file, if it names one.")] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines are JSON objects.")] = False,
) -> None:
    """Be the draft device of a cluster, until SIGTERM: meet its stages, and answer OpenAI's clients.

    It waits for the stages (flowspec worker), and again for one that is lost.  systemd is told when the
    first real token has come through all of them, and that the loop goes on.

    Examples:

      flowspec draft --config /opt/flowspec/current/etc/draft.toml
    """
    asked = DraftConfig.load(config)
    if key_file:
        if not asked.key_file:
            raise UsageError(f"{config} has no key_file: its links are not encrypted, and --key-file is of "
                             "no use")
        asked = asked.model_copy(update={"key_file": str(key_file)})
    service = _service(asked, api_key_file if asked.api_key_file else None)
    notifier = Notifier(os.environ)

    from flowspec_edge.runtime.met_clusters import Losses, MetClusters
    from flowspec_edge.serving.server import listen

    def open_cluster(sharing: Sharing) -> AbstractContextManager[SharedCluster]:
        return MetClusters(asked, notifier, **sharing)

    def ready(line: str) -> None:
        print(line, flush=True)
        notifier.ready(line)

    try:
        with listen(asked.host, asked.port, service.api_key) as listener:
            service.run(listener, open_cluster, ready, log_json, [Losses(notifier)])
    finally:
        notifier.stopping()


def _service(config: DraftConfig, api_key_file: Path | None) -> Service:
    """UsageError for a model that is not there, or not made for so many stages, and for a torch device that
    is not there."""
    from flowspec_edge import torchdevice

    model, params = resolve_model(config.model), Params()
    stages = stages_of(model, len(config.instances))
    torchdevice.require(config.device)
    require_runnable([config.strategy], model, params, "wall", stages)
    return Service(
        model=model, name=config.name, strategy=config.strategy, stages=stages, dtype=config.dtype,
        params=params, chat_template=None, api_key=_api_key(config, api_key_file), queue=config.queue,
        at_once=config.at_once or max(2, stages), context=config.context, answer_tokens=_ANSWER_TOKENS,
        ready_within=config.ready_within_s, rejoin_within=config.rejoin_within_s, cluster=config.cluster)


def _api_key(config: DraftConfig, file: Path | None) -> str | None:
    """What clients must send, from ``file`` instead of where the configuration says; None: nothing."""
    if not config.api_key_file:
        return None
    file = file or Path(config.api_key_file)
    try:
        key = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UsageError(f"cannot read the API key {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        key = ""
    if not key:
        raise UsageError(f"{config.api_key_file} must hold an API key, of ASCII characters only")
    return key
