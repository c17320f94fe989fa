"""PEARL: the draft model works while the target verifies (PEARL, section 3, algorithm 1).

Pre-verify: the target runs on the newest token while the draft makes gamma tokens.  If the first of them is
the target's token, the block goes to post-verify, else the target's token restarts the round.  Post-verify:
the target runs on the block while the draft makes the next one.  If all of it is accepted, the next block
follows (without a bonus token: its first token was verified with the last row), else back to pre-verify.  One
target run at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flowspec_edge.messages import Segment
from flowspec_edge.model.draft_kinds import LM
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.parameters import LONGEST_BLOCK, Parameters
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.segment_builder import SegmentBuilder


@dataclass(frozen=True)
class PearlParameters(Parameters):
    pearl_gamma: Annotated[int, "draft tokens a block; 0: as many as fit into one verification", 0] = 0

    def largest_segment(self) -> int:
        return max(super().largest_segment(), 1 + self.pearl_gamma)


class Pearl(TreeStrategy):
    name = "pearl"
    title = "PEARL"
    summary = "the draft makes the next block while the target verifies this one (PEARL)"
    parameters = PearlParameters
    params: PearlParameters
    drafter = LM.name

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self._pre_verify = True

    @property
    def max_in_flight(self) -> int:
        return 1

    @property
    def gamma(self) -> int:
        """Tokens of a draft: by default as many as the draft model makes in one verification."""
        return self.params.pearl_gamma or max(1, round(min(self.pipeline.draft_passes, LONGEST_BLOCK)))

    def begin_round(self) -> None:
        self._pre_verify = True
        self._draft_block(self.tree.root)

    def _draft_block(self, origin: Node) -> None:
        self.expand([origin], self.gamma, 1, self.gamma)

    def next_segment(self, rows: int | None = None) -> Segment | None:
        if self.tree.root.number >= 0:
            return None  # sent: its output decides
        if self._pre_verify:
            self._pre_verify = False
            return self.send((), root=True)
        if self.drafting:
            return None
        block = self.tree.pop_unsent(self.tree.size)
        self._draft_block(block[-1] if block else self.tree.root)
        return self.send(block, root=True)
