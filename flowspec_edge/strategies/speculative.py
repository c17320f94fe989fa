"""Plain speculative decoding: draft a chain of gamma, verify it through the pipeline (Leviathan et al.).

The baseline of the PEARL and PipeInfer papers.  Draft model and target wait for one another.
"""

from __future__ import annotations

from flowspec_edge.strategies.whole_tree import WholeTree
from flowspec_edge.tree.growth import Growth


class Speculative(WholeTree):
    """One chain a round."""

    name = "speculative"
    summary = "a draft model's chain, verified in one go, by turns (PEARL's and PipeInfer's baseline)"
    drafter = "lm"

    def begin_round(self) -> None:
        gamma = self.params.speculative_gamma
        self.growth = Growth(self.tree, [self.tree.root], gamma, 1, gamma)
