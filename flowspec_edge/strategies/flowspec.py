"""FlowSpec: continuous pipelined tree speculative decoding (paper, section III), and its ablations.

Unlike in the published code, D0 never stalls the pipeline: when the first stage becomes idle, a segment is
built from the best nodes, even during an expansion.  A merged expansion re-ranks unsent nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.tree_strategy import TreeParameters, TreeStrategy
from flowspec_edge.tree.draft_api import Commit


@dataclass(frozen=True)
class FlowSpecParameters(TreeParameters):
    expand_depth: Annotated[int, "d_exp: levels of a context-aware expansion"] = 5
    expand_size: Annotated[int, "L_exp: nodes of a context-aware expansion"] = 64
    extend_depth: Annotated[int, "levels of a score-aware expansion"] = 2
    extend_size: Annotated[int, "nodes of a score-aware expansion"] = 48

    def largest_tree(self) -> int:
        return self.tree_size + self.expand_size + self.extend_size


class FlowSpec(TreeStrategy):
    name = "flowspec"
    title = "FlowSpec"
    summary = "FlowSpec, the paper's: a tree of fixed depth, score-ordered, pruned and expanded in flight"
    parameters = FlowSpecParameters
    params: FlowSpecParameters

    def next_segment(self, rows: int | None = None) -> Segment | None:
        return self.send_best(self.params.segment if rows is None else rows)

    def row_probabilities(self, limit: int) -> Sequence[float] | None:
        return self.best_probabilities(min(limit, self.params.segment))

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self.record(numbers, successors)
        commits, restarted = self.accept()
        p = self.params
        if commits and not restarted:
            # Context-aware expansion: a new tree from the new root, merged into the old one (III-D).
            self.expand([self.tree.root], p.expand_depth, p.width, p.expand_size)
        elif not commits and not self.drafting:
            # Score-aware expansion: the context is the same, so go deeper where the tree is best.
            leaves = [n for n in self.tree.nodes() if not n.expanded and not n.children]
            leaves.sort(key=lambda n: (-n.score, n.id))
            self.expand(leaves[: p.width], p.extend_depth, p.width, p.extend_size)
        return commits


class FlowSpecNoSBD(FlowSpec):
    """Without score-based drafting: nodes leave shallow layers first."""

    name = "flowspec_no_sbd"
    title = "FlowSpec w/o SBD"
    summary = "FlowSpec with segments in layer order instead of score order (ablation)"
    order = "layer"

    def row_probabilities(self, limit: int) -> None:
        """Return None: the order is not that of the probabilities."""


class PrunedPP(TreeStrategy):
    """Without tree expansion (paper, section V-D): the round ends when the drafted tree is used up."""

    name = "pruned_pp"
    title = "Pruned PP"
    summary = "score-ordered segments, accepted and pruned one by one, no expansion (ablation)"

    def next_segment(self, rows: int | None = None) -> Segment | None:
        return None if self.drafting else self.send_best(self.params.segment if rows is None else rows)

    def row_probabilities(self, limit: int) -> Sequence[float] | None:
        return () if self.drafting else self.best_probabilities(min(limit, self.params.segment))
