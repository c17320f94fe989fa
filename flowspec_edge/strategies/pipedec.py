"""PipeDec: a dynamic tree of an ordinary draft model, one layer a timestep (PipeDec, section 3).

The tree is as deep as the pipeline.  Each timestep the draft model expands the newest layer, c
children a node, and the w best by cumulative probability enter the pipeline; when the last stage
has run, its token is the root's successor: a hit keeps the subtree, a miss clears everything.
With d stages and a hit rate h a timestep yields 1 / (d (1 - h) + h) tokens.
"""

from __future__ import annotations

from flowspec_edge.strategies.layered import LayeredStrategy


class PipeDec(LayeredStrategy):
    """One tree layer in every stage."""

    name = "pipedec"
    summary = "one layer of a draft model's tree in every stage, hit or miss a timestep (PipeDec)"
    drafter = "lm"

    @property
    def layer_width(self) -> int:
        return self.params.pipedec_width

    @property
    def children(self) -> int:
        return self.params.pipedec_children
