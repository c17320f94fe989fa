"""``flowspec generate --cluster``: the same answer, from the draft service of a deployed cluster.

Knows which options a service takes, and how its stream is shown.  Does not know how it is reached
(``fleet.draft_service``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec_edge.errors import UsageError
from flowspec_edge.sampling import Sampling

if TYPE_CHECKING:
    from flowspec_edge.fleet.inventory import DeviceEntry, Inventory

_TAKEN = {"prompt", "prompt_file", "chat", "system", "strategy", "max_new_tokens", "as_json", "cluster",
          *asdict(Sampling())}


@dataclass(frozen=True)
class Question:
    """What a service is asked.

    system    with ``chat`` alone; None: no such message
    strategy  None: the service's own
    given     names of the sampling values that go before what the model's makers advise
    """

    text: str
    chat: bool
    system: str | None
    strategy: str | None
    max_new_tokens: int
    sampling: Sampling
    given: Collection[str]

    @property
    def path(self) -> str:
        """Where it is asked."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """As OpenAI's clients would, with the token ids wanted."""
        values = asdict(self.sampling)
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_new_tokens, "seed": values["seed"],
                                "stream_options": {"include_usage": True}, "flowspec": {"tokens": True}}
        body |= {name: values[name] for name in ("temperature", "top_p", "top_k") if name in self.given}
        if self.strategy is not None:
            body["flowspec"]["strategy"] = self.strategy
        if not self.chat:
            return body | {"prompt": self.text}
        asked = [{"role": "system", "content": self.system}] if self.system is not None else []
        return body | {"messages": [*asked, {"role": "user", "content": self.text}]}


def refuse_local(given: Collection[str]) -> None:
    """UsageError if an option is given that only a run on this machine has."""
    if others := sorted(set(given) - _TAKEN):
        option = others[0].replace("_", "-")
        raise UsageError(f"--{option} does not go with --cluster: the service there decides it; see its "
                         "cluster.toml")


def generate_there(cluster: Path, question: Question, as_json: bool) -> None:
    """Print the answer of the cluster's draft service as it comes; errors are those of DraftService."""
    from flowspec_edge.fleet.draft_service import DraftService
    from flowspec_edge.fleet.inventory import load_inventory

    inventory = load_inventory(cluster)
    board = _draft_board(inventory, cluster)
    pieces: list[str] = []
    last: dict[str, Any] = {}
    with DraftService(inventory, board, os.environ.get("FLOWSPEC_API_KEY")) as service:
        model = service.model()
        for item in service.stream(question.path, question.body(model)):
            last |= {key: item[key] for key in ("flowspec", "usage") if item.get(key)}
            for choice in item["choices"]:
                last |= {"finish_reason": choice["finish_reason"]} if choice["finish_reason"] else {}
                piece = (choice["delta"].get("content") if question.chat else choice["text"]) or ""
                pieces.append(piece)
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
    told, details = last["usage"]["flowspec"], last["flowspec"]
    if as_json:
        print(json.dumps({
            **details, "text": "".join(pieces), "finish_reason": last["finish_reason"],
            "strategy": told["strategy"], "model": model, "cluster": inventory.cluster.name, "clock": "wall",
            "profile": None, "emulated": False,
            "sampling": {name: {"value": told[name], "from": _origin(name, question)}
                         for name in asdict(question.sampling)}}))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(_summary(inventory.cluster.name, model, last, details), file=sys.stderr)


def _summary(cluster: str, model: str, last: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """One line of figures for a person, as of a run on this machine."""
    told, stats = last["usage"]["flowspec"], details["stats"]
    return (f"[{told['strategy']}, {model} on {cluster}, {len(stats['stages'])} stages: "
            f"{len(details['tokens'])} tokens ({last['finish_reason']}), "
            f"{told['tokens_per_second']:.2f} tokens/s, {told['alt']:.2f} a turn, {told['alr']:.2f} a round, "
            f"first token after {told['ttft_s']:.2f} s]")


def _origin(name: str, question: Question) -> str:
    return "command line" if name in question.given else "default" if name == "seed" else "the service"


def _draft_board(inventory: Inventory, path: Path) -> DeviceEntry:
    if inventory.decided:
        return inventory.draft
    from flowspec_edge.fleet.deployment import resolve_deployment

    return resolve_deployment(inventory, path).draft
