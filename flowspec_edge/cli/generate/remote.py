"""``flowspec generate --cluster``: the answer of a deployed cluster's draft service."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.util.terminal import counted_stages

if TYPE_CHECKING:
    from flowspec_edge.boards.inventory import DeviceEntry, Inventory

_ACCEPTED = {"prompt", "prompt_file", "chat", "system", "strategy", "max_new_tokens", "as_json", "cluster",
             "json_schema", "json_object", "chat_template_kwargs", *asdict(Sampling())}


@dataclass(frozen=True)
class RemoteRequest:
    """A request to a server.

    explicit         names of the sampling values that override the model's generation_config.json
    schema           the JSON schema that the answer must match; None: any text
    template_values  variables of the chat template
    """

    text: str
    chat: bool
    system: str | None
    strategy: str | None
    max_new_tokens: int
    sampling: Sampling
    explicit: Collection[str]
    schema: dict[str, Any] | None = None
    template_values: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON body of OpenAI's API, with token ids requested."""
        values = asdict(self.sampling)
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_new_tokens, "seed": values["seed"],
                                "stream_options": {"include_usage": True}, "flowspec": {"tokens": True}}
        body |= {name: values[name] for name in ("temperature", "top_p", "top_k", "min_p")
                 if name in self.explicit}
        if self.strategy is not None:
            body["flowspec"]["strategy"] = self.strategy
        if self.schema is not None:
            schema = {"name": "answer", "schema": self.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if not self.chat:
            return body | {"prompt": self.text}
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        if self.template_values:
            body["chat_template_kwargs"] = self.template_values
        return body | {"messages": [*messages, {"role": "user", "content": self.text}]}


def refuse_local(options: Collection[str]) -> None:
    """Raise UsageError for an option that only applies to a run on this machine."""
    if others := sorted(set(options) - _ACCEPTED):
        option = others[0].replace("_", "-")
        raise UsageError(f"--{option} does not work with --cluster: the service determines it; see its "
                         "cluster.toml")


def generate_remotely(cluster: Path, request: RemoteRequest, as_json: bool) -> None:
    """Stream the answer to stdout; errors are those of DraftClient."""
    from flowspec_edge.boards.inventory import load_inventory
    from flowspec_edge.boards.services.client import DraftClient

    inventory = load_inventory(cluster)
    board = _draft_board(inventory, cluster)
    pieces: list[str] = []
    last: dict[str, Any] = {}
    figures: dict[str, Any] = {}  # tokens and statistics, and then the settings
    with DraftClient(inventory, board, os.environ.get("FLOWSPEC_API_KEY")) as service, _reporting_interrupt(pieces):
        model = service.model()
        for item in service.stream(request.path, request.body(model)):
            figures |= item.get("flowspec") or {}
            for choice in item["choices"]:
                last |= {"finish_reason": choice["finish_reason"]} if choice["finish_reason"] else {}
                piece = (choice["delta"].get("content") if request.chat else choice["text"]) or ""
                pieces.append(piece)
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
    if as_json:
        print(json.dumps({
            "tokens": figures["tokens"], "stats": figures["stats"], "text": "".join(pieces),
            "finish_reason": last["finish_reason"],
            "strategy": figures["strategy"], "model": model, "cluster": inventory.cluster.name,
            "clock": "wall",
            "profile": None, "emulated": False,
            "sampling": {name: {"value": figures[name], "from": _origin(name, request)}
                         for name in asdict(request.sampling)}}))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    stats = figures["stats"]
    line = figures_line(len(figures["tokens"]), last["finish_reason"], figures["tokens_per_second"],
                        figures["alt"], figures["alr"], figures["ttft_s"], stats.get("energy_j"))
    print(f"[{figures['strategy']}, {model} on {inventory.cluster.name}, {counted_stages(len(stats['stages']))}: "
          f"{line}]", file=sys.stderr)


@contextmanager
def _reporting_interrupt(pieces: Sequence[str]) -> Iterator[None]:
    """Report how much of the answer there is on Ctrl-C, which ends the connection and so the request."""
    began = time.monotonic()
    try:
        yield
    except KeyboardInterrupt:
        if pieces:
            print(f"\n[stopped after {time.monotonic() - began:.2f} s: {sum(map(len, pieces))} characters]",
                  file=sys.stderr)
        raise


def figures_line(tokens: int, finish: str, per_second: float | None, alt: float | None, alr: float | None,
                 ttft_s: float, joules: float | None, plain: float | None = None) -> str:
    """Write the figures of an answer; the rates are None for an answer of at most one token."""
    energy = "" if joules is None or not tokens else f", {joules / tokens:.2f} J a token"
    beside = "" if plain is None else f" (plain decoding: {plain:.2f})"
    first = f", first token after {ttft_s:.2f} s" if tokens else ""
    rates = "no speed: it begins with the second token"
    if per_second is not None:
        rates = ", ".join([f"{per_second:.2f} tokens/s{beside}",
                           *(f"{rate:.2f} a {unit}" for rate, unit in ((alt, "turn"), (alr, "round"))
                             if rate is not None)])
    return f"{tokens} token{'s' * (tokens != 1)} ({finish}), {rates}{first}{energy}"


def _origin(name: str, request: RemoteRequest) -> str:
    return "command line" if name in request.explicit else "default" if name == "seed" else "the service"


def _draft_board(inventory: Inventory, path: Path) -> DeviceEntry:
    if inventory.decided:
        return inventory.draft
    from flowspec_edge.boards.deploy.resolve import resolve_deployment

    return resolve_deployment(inventory, path).draft
