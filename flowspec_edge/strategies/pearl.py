"""PEARL: the draft model works while the target verifies (PEARL, section 3, algorithm 1).

Pre-verify: the target runs on the newest token alone while the draft makes gamma tokens; if the
first of them is what the target says, the block goes to post-verify, else the target's token
starts the round anew.  Post-verify: the target runs on the block while the draft makes the next
one; if all is accepted the next block follows (its first token has been verified with the last
row, so there is no bonus token), else back to pre-verify.  One target run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.params import LONGEST_BLOCK
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.growth import Growth
from flowspec_edge.tree.requests import Commit


class Pearl(TreeStrategy):
    """A chain in blocks; drafting and verification overlap."""

    name = "pearl"
    summary = "the draft makes the next block while the target verifies this one (PEARL)"
    drafter = "lm"

    @property
    def max_in_flight(self) -> int:
        return 1

    @property
    def gamma(self) -> int:
        """Tokens a block: by default as many as the draft makes in one verification."""
        return self.params.pearl_gamma or max(1, round(min(self.pipeline.draft_passes, LONGEST_BLOCK)))

    def begin_round(self) -> None:
        self._pre_verify = True
        self.growth = Growth(self.tree, [self.tree.root], self.gamma, 1, self.gamma)

    def next_segment(self) -> Segment | None:
        if self.tree.root.number >= 0:
            return None  # it was sent, its output will decide
        if self._pre_verify:
            self._pre_verify = False
            return self._send((), root=True)
        if self.growth is not None and not self.growth.done:
            return None
        block = self.tree.take(self.tree.size)
        newest = block[-1] if block else self.tree.root
        self.growth = Growth(self.tree, [newest], self.gamma, 1, self.gamma)
        return self._send(block, root=True)

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self._record(numbers, successors)
        return self._walk()[0]
