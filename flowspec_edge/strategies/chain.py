"""A single draft chain that fills the pipeline, flushed on a miss: what leyten/shard does.

Every segment continues the chain where the last one ended, however much of it is unverified.  The first wrong
token makes all that follow worthless: the stages drop it, and a new chain starts at the target's token.  With
N stages, a slot a token and acceptance a, a miss costs a round trip: about 1 / (1 + (1 - a) N) tokens a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_api import ABSENT, DraftOutput, DraftRequest
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.segment_builder import SegmentBuilder


@dataclass(frozen=True)
class ChainParameters(Parameters):
    chain_rows: Annotated[int, "draft tokens a segment"] = 1

    def largest_segment(self) -> int:
        return max(super().largest_segment(), 1 + self.chain_rows)


class Chain(TreeStrategy):
    name = "chain"
    summary = "one draft chain kept in flight, flushed on a miss (leyten/shard)"
    parameters = ChainParameters
    params: ChainParameters

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self._tip: Node | None = None  # of the chain; None: nothing can follow it
        self._unsent = 0

    def begin_round(self) -> None:
        self._tip, self._unsent = self.tree.root, 0

    def next_segment(self, rows: int | None = None) -> Segment | None:
        root = self.tree.root.number < 0
        nodes = self.tree.pop_unsent(min(self.params.chain_rows, (rows or self.params.chain_rows + 1) - root))
        self._unsent -= len(nodes)
        return self.send(nodes, root) if root or nodes else None

    def row_probabilities(self, limit: int) -> Sequence[float]:
        return self.best_probabilities(min(limit, self.params.chain_rows))

    def next_draft(self) -> DraftRequest | None:
        """One token more, as long as less than the next two segments' is waiting."""
        if self._tip is None or self._unsent >= 2 * self.params.chain_rows:
            return None
        return self.tree.draft_request([self._tip], 1)

    def on_draft(self, request: DraftRequest, output: DraftOutput) -> None:
        [asked] = request.nodes
        tip, token = self._tip, int(output.tokens[0, 0])
        if tip is None or asked.id != tip.id:
            return  # a miss has ended its chain
        self._tip = None if token == ABSENT else self.tree.add(tip, token, tip.score + output.scores[0, 0])
        self._unsent += self._tip is not None
