"""SPD's strategy: one token per stage and cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flowspec_edge.lab.spd.kind import KIND
from flowspec_edge.messages import Segment
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.layered import LayeredStrategy
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.tree.draft_api import DraftRequest
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.segment_builder import SegmentBuilder

_CHILDREN = 4  # of a branch's last node, if W > 1


@dataclass(frozen=True)
class SPDParameters(Parameters):
    spd_width: Annotated[int, "W: branches kept"] = 1

    def largest_segment(self) -> int:
        return max(super().largest_segment(), 1 + self.spd_width)


class SPD(LayeredStrategy):
    """Speculative Pipeline Decoding: one token per stage and cycle (SPD, sections 3.1, 3.4 and 3.6).

    A speculation module drafts the next token *while* the pipeline takes its step, from the states at the
    step's start: the newest token's embedding, and the states that stages have returned of older tokens.
    With n stages and an acceptance a, a cycle yields 1 / (n (1 - a) + a) tokens.

    The step starts when the newest token enters the first stage.  The state with which the token before it
    has left that stage arrives a moment later, by a link's time; a draft waits for it.

    A width W above 1 makes a tree: each branch's last node gets four children, and the W best by cumulative
    probability stay (section 4.1).  Acceptance is exact, unlike the published code's rejection test of child
    after child.
    """

    name = KIND.name
    title = "SPD"
    summary = "one token a stage, foreseen from the states in the pipeline (SPD)"
    parameters = SPDParameters
    params: SPDParameters
    drafter = KIND.name

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self.layer_width = self.params.spd_width
        self.children = 1 if self.layer_width == 1 else _CHILDREN
        # After each inner stage, a row's deepest state and the one at half that depth; the final state comes
        # as an output.
        layers = max(pipeline.depths, default=0)
        inner = {depth for depth in pipeline.depths[:-1] if depth < layers}
        self.segment_taps = tuple(sorted({*inner, *(depth // 2 for depth in (*inner, layers))} - {0}))
        self._first = pipeline.depths[0] if pipeline.depths else 0  # layers of the first stage
        self._newest_layer_run = self._before = -1  # runs of the newest layer and of the one before it; -1: none
        self._tapped = -1  # the newest run whose state after the first stage has arrived

    def send(self, nodes: Sequence[Node], root: bool) -> Segment:
        segment = super().send(nodes, root)
        comes = not root and self._first in self.segment_taps
        self._before, self._newest_layer_run = self._newest_layer_run if comes else -1, segment.run
        return segment

    def on_tap(self, run: int, layer: int) -> None:
        if layer == self._first:
            self._tapped = max(self._tapped, run)

    def next_draft(self) -> DraftRequest | None:
        return super().next_draft() if self._before <= self._tapped else None

    @classmethod
    def drafts_with(cls, params: Parameters) -> str | None:
        """Return its own module: no other draft model reads the pipeline's states."""
        return cls.drafter

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        layers = max(self.pipeline.depths, default=0)
        return (layers // 2,) if layers > 1 else ()
