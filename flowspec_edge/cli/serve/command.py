"""``flowspec serve``: an OpenAI-compatible endpoint for a model over a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.clusters import choose_clock, local_processes
from flowspec_edge.cli.common.option_groups import with_dataclasses
from flowspec_edge.cli.common.options import (
    MODEL,
    MOST_AT_ONCE,
    MOST_REPEATS,
    MOST_SECONDS,
    MOST_TOKENS,
    SERVICE,
    STRATEGY,
    TIME,
    AnsweringModelOption,
    BoardModelOption,
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    EmulateOption,
    LogJsonOption,
    StagesOption,
    answering_dtype,
    device_of,
    dtype_of,
    not_nan,
    require_room,
    stages_of,
)
from flowspec_edge.cli.common.workload import require_runnable, with_a_draft
from flowspec_edge.cli.serve.service import Service
from flowspec_edge.d0.capacity import cache_rows
from flowspec_edge.d0.request import SchedulingPolicy
from flowspec_edge.drivers.processes.spec import ClusterSpec, Here
from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import require_template
from flowspec_edge.model.opened import DEMO, answering_model, resolve_model
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params
from flowspec_edge.strategies.registry import require_strategy
from flowspec_edge.util.urls import origin_problem

if TYPE_CHECKING:
    from flowspec_edge.boards.inventory import Inventory
    from flowspec_edge.boards.ssh_stages import SshBoards



@with_dataclasses(params=Params)
def serve(
    cluster: Annotated[Path | None, typer.Option(
        "--cluster", metavar="FILE", show_default=False, rich_help_panel=TIME,
        help="Serve on the boards of this cluster.toml.  This machine must be the draft device.")] = None,
    board_model: BoardModelOption = None,
    model: AnsweringModelOption = None,
    name: Annotated[str | None, typer.Option(
        "--name", help="The model's name in the API.  Default: its directory's name.", metavar="NAME",
        show_default=False, rich_help_panel=MODEL)] = None,
    strategy: Annotated[str, typer.Option(
        "--strategy", help="Default of requests: a name of flowspec strategies.", metavar="NAME",
        rich_help_panel=STRATEGY)] = DEFAULT_STRATEGY,
    stages: StagesOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    chat_template: ChatTemplateOption = None,
    host: Annotated[str, typer.Option(
        "--host", help="The address to listen on; other than loopback needs an API key.", metavar="ADDRESS",
        rich_help_panel=SERVICE)] = "127.0.0.1",
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, help="0: any free port.", metavar="PORT",
        rich_help_panel=SERVICE)] = 8000,
    api_key: Annotated[str | None, typer.Option(
        "--api-key", envvar="FLOWSPEC_API_KEY", metavar="KEY", show_default=False, rich_help_panel=SERVICE,
        help="The key that clients must send, or several, one a line, for callers that take turns; "
             "other users cannot see it in the environment.")] = None,
    forwarded_allow_ips: Annotated[str, typer.Option(
        "--forwarded-allow-ips", envvar="FORWARDED_ALLOW_IPS", metavar="ADDRESSES", show_default=False,
        help="Proxies whose X-Forwarded-For names the client, for fair turns: addresses or networks, "
             "separated by commas.  Default: none.", hidden=True, rich_help_panel=SERVICE)] = "",
    cors_origin: Annotated[list[str] | None, typer.Option(
        "--cors-origin", metavar="ORIGIN", show_default=False, hidden=True, rich_help_panel=SERVICE,
        help="A web page's origin, such as http://localhost:3000, that may ask from a browser; several times "
             "for several, * for all.")] = None,
    queue: Annotated[int, typer.Option(
        "--queue", min=0, max=MOST_REPEATS, help="Maximum requests that wait; more are refused with 429.",
        hidden=True, rich_help_panel=SERVICE)] = 16,
    at_once: Annotated[int, typer.Option(
        "--at-once", min=0, max=MOST_AT_ONCE, show_default=False, metavar="N", rich_help_panel=SERVICE,
        help="Maximum requests that share the stages.  Default: the number of stages, at least 2.")] = 0,
    scheduling_policy: Annotated[SchedulingPolicy, typer.Option(
        "--scheduling-policy", rich_help_panel=SERVICE, help=(
            "fair: these requests share every slot, weighted by their priority; fcfs: the oldest request's "
            "rows go first."))] = "fair",
    context: Annotated[int, typer.Option(
        "--context", min=1, max=MOST_TOKENS, metavar="N", rich_help_panel=SERVICE, help=(
            "Maximum tokens that the caches hold, of all requests together, cached prefixes included."))] = 4096,
    max_new_tokens: Annotated[int, typer.Option(
        "--max-new-tokens", min=1, max=MOST_TOKENS, metavar="N", rich_help_panel=SERVICE,
        help="Maximum tokens of an answer, for requests that set no limit.")] = 1024,
    ready_within: Annotated[float, typer.Option(
        "--ready-within", min=1, max=MOST_SECONDS, callback=not_nan, metavar="S",
        help="Maximum age in seconds of the last token for /ready to answer 200; an idle cluster generates one "
             "twice as often.",
        hidden=True, rich_help_panel=SERVICE)] = 60.0,
    rejoin_within: Annotated[float, typer.Option(
        "--rejoin-within", min=0, max=MOST_SECONDS, callback=not_nan, metavar="S",
        help="Seconds for a lost stage to rejoin before open requests fail; 0: they fail at once.",
        hidden=True, rich_help_panel=SERVICE)] = 60.0,
    emulate: EmulateOption = None,
    log_json: LogJsonOption = False,
    *,
    params: Params,
) -> None:
    """Serve OpenAI's API, with a page that shows the cluster at work.

    /v1/chat/completions, /v1/completions, /v1/responses and /v1/models are OpenAI's; / is the page, /metrics
    is for Prometheus.  A few requests share the stages, others wait.  /health: the server is alive; /ready: a
    token passed the pipeline recently.  Ctrl-C or SIGTERM ends the server and its devices.

    Examples:

      flowspec serve
      flowspec serve --model vicuna-7b-v1.5 --name vicuna --port 9000 --log-json
      FLOWSPEC_API_KEY=… flowspec serve --host 0.0.0.0 --at-once 4 --queue 8
      flowspec serve --cluster cluster.toml --model llama-13b
      curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json"
      -d '{"model": "smollm2-135m", "prompt": "The sky is", "max_tokens": 32}'
    """
    require_strategy(strategy)
    for origin in cors_origin or ():
        if problem := origin_problem(origin):
            raise UsageError(f"--cors-origin: {problem}")
    open_model = resolve_model(model or (DEMO if cluster else answering_model()))
    boards = _boards(cluster, board_model, stages, emulate, device)
    clock_settings = choose_clock("wall", "paper-7b", emulate)
    stages = stages_of(open_model, len(boards.verify) if boards else stages, clock_settings.profile)
    at_once = at_once or max(2, stages)
    if chat_template is not None:
        require_template(open_model, chat_template)
    params = with_a_draft(strategy, open_model, params)
    require_runnable([strategy], open_model, params, "wall", stages)
    if api_key is not None and not (api_key.strip() and api_key.isascii()):
        raise UsageError("the API key must not be empty, and of ASCII characters only")

    if boards is None:
        device = device_of(device, open_model, dtype_of(open_model, dtype), processes=clock_settings.processes(stages),
                           rows=context)
    require_room(context, at_once, cache_rows(context, at_once, params, stages), open_model,
                 dtype_of(open_model, dtype), local=boards is None and device == "cpu")
    service = Service(
        model=open_model, name=name or open_model.name, strategy=strategy, stages=stages,
        dtype=dtype_of(open_model, dtype) if boards else answering_dtype(open_model, dtype, device),
        params=params, chat_template=chat_template, api_key=api_key, queue=queue, at_once=at_once,
        context=context, answer_tokens=max_new_tokens, ready_within=ready_within,
        rejoin_within=rejoin_within, scheduling_policy=scheduling_policy,
        cluster=boards.cluster.name if boards else None, profile=emulate,
        device=None if boards else device, forwarded_allow_ips=forwarded_allow_ips,
        cors_origins=tuple(cors_origin or ()))

    from flowspec_edge.cli.common.plain_speed import shared_processors, sharing_note
    from flowspec_edge.serving.server import listen

    shared = None if boards else shared_processors(clock_settings, strategy, stages, device)

    def ready(line: str) -> None:
        print(line, *([sharing_note(shared)] if shared else []), sep="\n", flush=True)

    with listen(host, port, api_key) as listener:
        backend: Here | SshBoards
        if boards is None:
            backend = local_processes(stages, device, clock_settings.profile)
        else:
            from flowspec_edge.boards.ssh_stages import SshBoards

            backend = SshBoards(boards, board_model or str(open_model.path.resolve()), service.dtype)
            device = backend.device
        service.run(listener, ClusterSpec(open_model.path, stages, service.dtype, device=device), backend, ready,
                    log_json)


def _boards(cluster: Path | None, board_model: str | None, stages: int, emulate: str | None,
            device: str) -> Inventory | None:
    if cluster is None:
        if board_model is not None:
            raise UsageError("--board-model works with --cluster only")
        return None
    others = {"--stages": stages > 0, "--emulate": emulate is not None,
              "--device": device != "auto"}
    if conflicting := [name for name, is_given in others.items() if is_given]:
        raise UsageError(f"give --cluster or {conflicting[0]}, not both: the cluster file names the devices")
    from flowspec_edge.boards.inventory import load_inventory

    return load_inventory(cluster)
