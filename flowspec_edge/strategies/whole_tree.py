"""What the synchronous tree methods share: draft a tree, verify it whole, walk once, start anew.

Knows that nothing is sent before the tree is complete, and that one segment holds all of it.  How
the tree is drafted, and by which devices it is verified, each strategy says in its own file.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.requests import Commit


class WholeTree(TreeStrategy):
    """Speculative decoding as on one device: D0 and the target take turns."""

    @property
    def max_in_flight(self) -> int:
        return 1

    def next_segment(self) -> Segment | None:
        if self.tree.root.number >= 0 or (self.growth is not None and not self.growth.done):
            return None
        return self._send(self.tree.take(self.tree.size), root=True)

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self._record(numbers, successors)
        return self._walk()[0]
