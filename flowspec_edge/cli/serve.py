"""``flowspec serve``: an OpenAI-compatible endpoint for a model over a cluster.

Knows what is checked before anything is started, and where the devices are.  Does not know what
answers clients (``cli.service``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.clusters import open_boards, open_processes, timing
from flowspec_edge.cli.cut import dtype_of, stages_of
from flowspec_edge.cli.measuring import require_runnable
from flowspec_edge.cli.options import (
    BoardModelOption,
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    EmulateOption,
    ModelOption,
    StagesOption,
    with_dataclasses,
)
from flowspec_edge.cli.service import Service
from flowspec_edge.cli.torch_device import device_of
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import DEMO, resolve_model
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params

if TYPE_CHECKING:
    from flowspec_edge.fleet.inventory import Inventory
    from flowspec_edge.runtime.clusters import Sharing
    from flowspec_edge.runtime.request import SharedCluster

_EXAMPLES = """
Examples:

  flowspec serve

  flowspec up --local

  flowspec serve --model vicuna-7b-v1.5 --name vicuna --port 9000 --log-json

  FLOWSPEC_API_KEY=… flowspec serve --host 0.0.0.0 --at-once 4 --queue 8

  flowspec serve --cluster cluster.toml --model llama-13b

  curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json"
  -d '{"model": "demo", "prompt": "def f(x):", "max_tokens": 32}'
"""


@with_dataclasses(params=Params)
def serve(
    local: Annotated[bool, typer.Option(
        "--local", show_default=False,
        help="All devices are processes on this machine: the default.")] = False,
    cluster: Annotated[Path | None, typer.Option(
        "--cluster", metavar="FILE", show_default=False,
        help="Serve on the boards of this cluster.toml, of which this machine is the draft device.")] = None,
    board_model: BoardModelOption = None,
    model: ModelOption = DEMO,
    name: Annotated[str | None, typer.Option(
        "--name", help="What clients call the model; by default its directory's name.", metavar="NAME",
        show_default=False)] = None,
    strategy: Annotated[str, typer.Option(
        "--strategy", help="For requests that name none; see: flowspec strategies.")] = DEFAULT_STRATEGY,
    stages: StagesOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    chat_template: ChatTemplateOption = None,
    host: Annotated[str, typer.Option("--host", help="The address to listen on; one that others can reach "
                                                     "needs an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(
        "--api-key", envvar="FLOWSPEC_API_KEY", metavar="KEY", show_default=False,
        help="Clients must send it; better given in the environment, where others cannot read it.")] = None,
    queue: Annotated[int, typer.Option(
        "--queue", min=0, help="Requests that may wait for their turn; more are refused with 429.")] = 16,
    at_once: Annotated[int, typer.Option(
        "--at-once", min=0, show_default=False,
        help="Requests that share the stages at a time; 0: as many as there are stages, at least 2.")] = 0,
    context: Annotated[int, typer.Option(
        "--context", min=1, metavar="N", help=(
            "Tokens of all requests' texts together, kept ones included, that the caches hold: what "
            "flowspec plan --context N --at-once M counts with."))] = 4096,
    answer_tokens: Annotated[int, typer.Option(
        "--answer-tokens", min=1, help="The longest answer in a chat whose client sets no limit.")] = 1024,
    ready_within: Annotated[float, typer.Option(
        "--ready-within", min=1, help="/ready needs a token in the last so many seconds; when nobody asks "
                                      "anything, one is made twice as often.", metavar="S")] = 60.0,
    rejoin_within: Annotated[float, typer.Option(
        "--rejoin-within", min=0, metavar="S", help="A lost stage may take so many seconds to be back before "
                                                    "open requests get an error; 0: they get it at once.",
        )] = 60.0,
    emulate: EmulateOption = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines are JSON objects.")] = False,
    *,
    params: Params,
) -> None:
    """Answer OpenAI's clients, and show people the cluster at work on a page.

    /v1/chat/completions, /v1/completions and /v1/models are OpenAI's; / is the page, /metrics is for
    Prometheus.  A few requests share the stages, others wait their turn.  /health says that the server is
    alive, /ready that a token came through the pipeline lately.  Ctrl-C or SIGTERM ends it and its devices.
    """
    found = resolve_model(model)
    boards = _boards(cluster, board_model, local, stages, emulate, device)
    stages = stages_of(found, len(boards.verify) if boards else stages)
    at_once = at_once or max(2, stages)
    when = timing("wall", "paper-7b", emulate)
    require_runnable([strategy], found, params, "wall", stages)
    if api_key is not None and not (api_key and api_key.isascii()):
        raise UsageError("the API key must not be empty, and of ASCII characters only")

    if boards is None:
        device = device_of(device, found, dtype_of(found, dtype), processes=when.processes(stages),
                           rows=context)
    service = Service(
        model=found, name=name or found.name, strategy=strategy, stages=stages, dtype=dtype_of(found, dtype),
        params=params, chat_template=chat_template, api_key=api_key, queue=queue, at_once=at_once,
        context=context, answer_tokens=answer_tokens, ready_within=ready_within, rejoin_within=rejoin_within,
        cluster=boards.cluster.name if boards else None, profile=emulate,
        device=None if boards else device)

    def open_cluster(sharing: Sharing) -> AbstractContextManager[SharedCluster]:
        if boards:
            return open_boards(boards, found, board_model, dtype, **sharing)
        return open_processes(when, found, stages, dtype, device=device, **sharing)

    from flowspec_edge.serving.server import listen

    with listen(host, port, api_key) as listener:
        if boards is None and device == "cpu":
            from flowspec_edge.runtime.nursery import nursery

            nursery()  # it imports while we do
        service.run(listener, open_cluster, lambda line: print(line, flush=True), log_json)


serve.__doc__ = f"{cleandoc(serve.__doc__ or '')}\n{_EXAMPLES}"


def _boards(cluster: Path | None, board_model: str | None, local: bool, stages: int, emulate: str | None,
            device: str) -> Inventory | None:
    """The cluster's inventory; None if the devices are processes here."""
    if cluster is None:
        if board_model is not None:
            raise UsageError("--board-model goes with --cluster only")
        return None
    others = {"--local": local, "--stages": stages > 0, "--emulate": emulate is not None,
              "--device": device != "auto"}
    if given := [name for name, is_given in others.items() if is_given]:
        raise UsageError(f"give --cluster or {given[0]}, not both: the cluster file names the devices")
    from flowspec_edge.fleet.inventory import load_inventory

    return load_inventory(cluster)
