"""The programs of systemd units on boards: ``flowspec worker`` and ``flowspec draft``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.options import LogJsonOption, stages_of
from flowspec_edge.cli.common.workload import require_runnable
from flowspec_edge.cli.serve.service import Service
from flowspec_edge.errors import OtherRelease, UsageError
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.strategies.params import Params

if TYPE_CHECKING:
    from flowspec_edge.d0.config import DraftConfig

ConfigOption = Annotated[Path, typer.Option("--config", metavar="FILE", help="Its configuration, as TOML.")]
KeyFileOption = Annotated[Path | None, typer.Option(
    "--key-file", metavar="F", show_default=False,
    help="Replaces the configuration's key_file, such as by a service's credential.")]
_ANSWER_TOKENS = 1024


def worker(
    config: ConfigOption,
    key_file: KeyFileOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log to stderr.")] = False,
) -> None:
    """Run one stage of a cluster until SIGTERM: the program of flowspec-verify@.service.

    It waits for a draft device (flowspec draft), and again when that one disconnects.  systemd is notified
    when the shard is loaded, and by a watchdog.

    Examples:

      flowspec worker --config /opt/flowspec/current/etc/verify-1.toml
    """
    from flowspec_edge.drivers.stage.process import serve
    from flowspec_edge.drivers.stage.release_link import ReleaseLink
    from flowspec_edge.drivers.stage.sd_notify import Notifier

    changes = {"key_file": str(key_file)} if key_file else {}
    release = ReleaseLink(config)
    code = serve(config, verbose, changes, Notifier(os.environ), release=release)
    # The unit takes the previous release for that code; where `current` has moved, a restart is enough.
    raise typer.Exit(1 if code == OtherRelease.exit_code and release.moved else code)


def draft(
    config: ConfigOption,
    key_file: KeyFileOption = None,
    api_key_file: Annotated[Path | None, typer.Option(
        "--api-key-file", metavar="F", show_default=False,
        help="Replaces the configuration's api_key_file, if it has one.")] = None,
    log_json: LogJsonOption = False,
) -> None:
    """Run the draft device of a cluster until SIGTERM: the program of flowspec-draft.service.

    It waits for the stages (flowspec worker), again for a lost one, and answers OpenAI's clients.  systemd is
    notified when the first token has passed all stages, and by a watchdog.

    Examples:

      flowspec draft --config /opt/flowspec/current/etc/draft.toml
    """
    from flowspec_edge.d0.config import DraftConfig
    from flowspec_edge.drivers.stage.sd_notify import Notifier
    from flowspec_edge.util.tomlfile import load_toml

    settings = load_toml(config, DraftConfig)
    if key_file:
        if not settings.key_file:
            raise UsageError(f"{config} has no key_file, so its links are not encrypted: leave out "
                             "--key-file")
        settings = settings.model_copy(update={"key_file": str(key_file)})
    service = _service(settings, api_key_file if settings.api_key_file else None)
    notifier = Notifier(os.environ)

    from flowspec_edge.drivers.processes.clusters import OutageStatus, Services
    from flowspec_edge.serving.server import listen

    def ready(line: str) -> None:
        print(line, flush=True)
        notifier.ready(line)

    try:
        with listen(settings.host, settings.port, service.api_key) as listener:
            services = Services(settings, notifier)
            service.run(listener, services.spec, services, ready, log_json, [OutageStatus(notifier)])
    finally:
        notifier.stopping()


def _service(config: DraftConfig, api_key_file: Path | None) -> Service:
    """Raise UsageError for a missing model, a wrong number of sharded stages, or a missing torch device."""
    from flowspec_edge.util import torchdevice

    model, params = resolve_model(config.model), Params(draft=config.draft)
    stages = stages_of(model, len(config.instances))
    torchdevice.require(config.device)
    require_runnable([config.strategy], model, params, "wall", stages)
    return Service(
        model=model, name=config.name, strategy=config.strategy, stages=stages, dtype=config.dtype,
        params=params, chat_template=None, api_key=_api_key(config, api_key_file), queue=config.queue,
        at_once=config.at_once or max(2, stages), context=config.context, answer_tokens=_ANSWER_TOKENS,
        ready_within=config.ready_within_s, rejoin_within=config.rejoin_within_s,
        scheduling_policy=config.scheduling_policy, cluster=config.cluster,
        forwarded_allow_ips=config.forwarded_allow_ips, cors_origins=config.cors_origins)


def _api_key(config: DraftConfig, file: Path | None) -> str | None:
    """Read the API key from ``file`` or the configured file; None: clients need no key."""
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
