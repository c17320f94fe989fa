"""Pruned PP: the tree in score order, walked and pruned segment by segment, never expanded.

FlowSpec's ablation without tree expansion (paper, section V-D): early acceptance and pruning, but
when the drafted tree is used up the round ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.requests import Commit


class PrunedPP(TreeStrategy):
    """Draft once a round; send the best nodes first; accept as the segments return."""

    name = "pruned_pp"
    summary = "score-ordered segments, accepted and pruned one by one, no expansion (ablation)"

    def next_segment(self) -> Segment | None:
        if self.growth is not None and not self.growth.done:
            return None
        root = self.tree.root.number < 0
        nodes = self.tree.take(self.params.segment - root)
        return self._send(nodes, root) if root or nodes else None

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self._record(numbers, successors)
        return self._walk()[0]
