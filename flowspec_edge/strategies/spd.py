"""SPD: Speculative Pipeline Decoding, one token a stage and cycle (SPD, sections 3.1, 3.4 and 3.6).

A speculation module drafts the next token *while* the pipeline takes its step, on the states at
the step's start: it reads the embedding of the newest token, which has just been sent, and what
the stages have sent back of the older ones.  The token that leaves the pipeline tests the next
oldest; a miss empties the pipeline.  With n stages and an acceptance a, a cycle yields
1 / (n (1 - a) + a) tokens.

With a width W above 1 a tree: each kept branch's last node gets four children and the W best
by cumulative probability stay (section 4.1).  Acceptance is the rule of all strategies here, not
the published code's rejection test of child after child, which is not exact.
"""

from __future__ import annotations

from flowspec_edge.strategies.layered import LayeredStrategy
from flowspec_edge.strategies.params import Params

_CHILDREN = 4  # of a branch's last node in a tree


class SPD(LayeredStrategy):
    """A layer of W tokens in every stage, drafted from the pipeline's own states."""

    name = "spd"
    summary = "one token a stage, foreseen from the states in the pipeline (SPD)"
    drafter = "spd"

    @classmethod
    def drafts_with(cls, params: Params) -> str:
        """Its own module always: no other draft model reads the pipeline's states."""
        return "spd"

    @property
    def layer_width(self) -> int:
        return self.params.spd_width

    @property
    def children(self) -> int:
        return 1 if self.params.spd_width == 1 else _CHILDREN

    @property
    def segment_taps(self) -> tuple[int, ...]:
        """What a row shows after each inner stage: its deepest state and the one half way there.

        The state after all layers comes as an output, behind the final norm, and its half with it.
        """
        layers = max(self.pipeline.depths, default=0)
        inner = {depth for depth in self.pipeline.depths[:-1] if depth < layers}
        return tuple(sorted({*inner, *(depth // 2 for depth in (*inner, layers))} - {0}))

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        layers = max(self.pipeline.depths, default=0)
        return (layers // 2,) if layers > 1 else ()
