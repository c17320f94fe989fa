"""FlowSpec: continuous pipelined tree speculative decoding (paper, section III).

Score-sorted segments, a walk and a prune for every segment that returns, context-aware expansion
from the new root after every acceptance, score-aware expansion when the pipeline would run dry.

Where this differs from the published code: D0 never makes the pipeline wait, so a segment is cut
from whatever is best at the moment the first stage has a free slot, however far an expansion has
come; a merged expansion re-ranks the nodes that were not sent yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.growth import Growth
from flowspec_edge.tree.requests import Commit


class FlowSpec(TreeStrategy):
    """Draft, verify, prune and expand without a pause."""

    name = "flowspec"
    summary = "continuous tree speculation: score-ordered, pruned and expanded in flight"

    def next_segment(self) -> Segment | None:
        root = self.tree.root.number < 0
        nodes = self.tree.take(self.params.segment - root)
        return self._send(nodes, root) if root or nodes else None

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self._record(numbers, successors)
        commits, restarted = self._walk()
        if commits and not restarted:
            self._expand_from_root()
        elif not commits:
            self._extend_leaves()
        return commits

    def _expand_from_root(self) -> None:
        """Context-aware expansion: a new tree from the new root, merged into the old (III-D)."""
        p = self.params
        self.growth = Growth(self.tree, [self.tree.root], p.expand_depth, p.width, p.expand_size)

    def _extend_leaves(self) -> None:
        """Score-aware expansion: the context is the same, so go deeper where the tree is best."""
        if self.growth is not None and not self.growth.done:
            return
        p = self.params
        leaves = [n for n in self.tree.nodes() if not n.expanded and not n.children]
        leaves.sort(key=lambda n: (-n.score, n.id))
        self.growth = Growth(self.tree, leaves[: p.width], p.extend_depth, p.width, p.extend_size)
