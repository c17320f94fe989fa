"""STPP: a token tree of a fixed shape, verified whole through the pipeline (PipeDec's baseline).

The shape says how many children every node of a level has, whatever their scores; the default is
SpecInfer's.
"""

from __future__ import annotations

from math import prod

from flowspec_edge.strategies.whole_tree import WholeTree
from flowspec_edge.tree.draft_tree import DraftTree
from flowspec_edge.tree.growth import Growth


class StaticGrowth(Growth):
    """Expands every node of a level; ``branching[i]`` children for each node of level i."""

    def __init__(self, tree: DraftTree, branching: tuple[int, ...]) -> None:
        sizes = [prod(branching[: i + 1]) for i in range(len(branching))]
        super().__init__(tree, [tree.root], len(branching), width=max(sizes), keep=sum(sizes))
        self._branching = branching

    def _children(self) -> int:
        return self._branching[-self._levels]


class STPP(WholeTree):
    """One static tree a round."""

    name = "stpp"
    summary = "a static token tree, verified whole through the pipeline (PipeDec's baseline)"
    drafter = "lm"

    def begin_round(self) -> None:
        self.growth = StaticGrowth(self.tree, self.params.stpp_levels())
