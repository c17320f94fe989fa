"""How often a draft model's first choice is right, and its second where the first is not (beta).

Along the chain that is in flight in a pipeline of four stages.  A chain that is flushed on a miss gives the
second figure away; a tree does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.bench.samples import repeats_itself
from flowspec_edge.lab.bench.tasks import load_prompts
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.layered import Chain
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.tree.draft_api import Commit, DraftOutput, DraftRequest
from microbench._common import Row, demo_prompts, options, print_rows

_CHOICES = 4
_LONGEST = 96  # tokens of a prompt


class RankedChain(Chain):
    """A chain that counts, over all requests, verified tokens by the draft model's rank of them."""

    name = "ranked_chain"
    ranks: ClassVar[Counter[int]] = Counter()  # 0 is the first choice, _CHOICES none of those asked for

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._choices: dict[int, list[int]] = {}  # by position of the node before

    def next_draft(self) -> DraftRequest | None:
        request = super().next_draft()
        return request and DraftRequest(request.root, request.nodes, _CHOICES)

    def on_draft(self, request: DraftRequest, output: DraftOutput) -> None:
        if self._newest and self._newest[0].id == request.nodes[0].id:
            self._choices[request.nodes[0].position] = output.tokens[0].tolist()
        super().on_draft(request, output)

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        before = self.tree.root.position
        commits = super().on_verified(run, numbers, successors)
        for position, commit in enumerate(commits, before):
            if choices := self._choices.get(position):
                self.ranks[choices.index(commit.token) if commit.token in choices else _CHOICES] += 1
        return commits


def main() -> None:
    args = options(__doc__, prompts="", draft="eagle2", limit=16, tokens=64)
    model = resolve_model()
    tokenizer = Tokenizer(model)
    prompts = demo_prompts(args.limit)
    if args.prompts:
        file_prompts = load_prompts(Path(args.prompts), args.limit)
        prompts = [tokenizer.encode(prompt.text)[-_LONGEST:] for prompt in file_prompts]
    name = strategy_class("microbench.runner_up:RankedChain").name
    ranks = strategy_class(name).ranks  # type: ignore[attr-defined]
    cluster = VirtualCluster(model.path, 4, load_profile("paper-7b"))
    rows: list[Row] = []
    for temperature in (0.0, 1.0):
        ranks.clear()
        for prompt in prompts:
            before = Counter(ranks)
            result = cluster.generate(Request(prompt, name, args.tokens, Sampling(temperature),
                                              params=Params(draft=args.draft)))
            if repeats_itself(result.tokens):
                ranks.clear()
                ranks.update(before)
        total, first = sum(ranks.values()), ranks[0]
        title = f"T = {temperature:g}, {args.draft}, {total} tokens"
        rows += [(f"{title}: first choice right", first / total, ""),
                 ("  second choice right where the first is not", ranks[1] / (total - first), ""),
                 ("  one of the next two", (ranks[2] + ranks[3]) / (total - first), "")]
    print_rows(rows)


if __name__ == "__main__":
    main()
