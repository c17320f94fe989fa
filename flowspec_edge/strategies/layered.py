"""PipeDec and a chain: one tree layer per segment.

A draft pass expands the newest layer while it is in the first stage; the best children become the next layer
when the first stage becomes idle.  Outputs that return meanwhile prune the candidates first, so survivors
take the places of dead ones (PipeDec, section 3.3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from flowspec_edge.messages import Segment
from flowspec_edge.model.draft_kinds import LM
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_api import DraftOutput, DraftRequest
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.segment_builder import SegmentBuilder

Candidate = tuple[float, Node, int]  # cumulative score, parent, token


class LayeredStrategy(TreeStrategy):
    """A miss empties the pipeline.

    layer_width   nodes per layer (PipeDec's w)
    children      most children per node (PipeDec's c)
    segment_taps  hidden states of a layer's rows that the drafter uses
    """

    order = "layer"
    layer_width = children = 1
    segment_taps: tuple[int, ...] = ()

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self._newest: list[Node] = []
        self._candidates: list[Candidate] | None = None  # for the next layer; None: not drafted yet

    def begin_round(self) -> None:
        self._newest, self._candidates = [self.tree.root], None

    def next_segment(self, rows: int | None = None) -> Segment | None:
        if self.tree.root.number < 0:  # a new round, or a hit among candidates that were not sent
            self.begin_round()
            return self.send((), root=True)
        if self._candidates is None:
            return None
        self._adopt(self._candidates)
        layer = self.tree.pop_unsent(self.layer_width)
        if not layer:
            return None  # all candidates died; the segments in flight decide how the round ends
        self._newest, self._candidates = layer, None
        return self.send(layer, root=False)

    def next_draft(self) -> DraftRequest | None:
        if self._candidates is not None or self._newest[0].number < 0:
            return None
        self._newest = [node for node in self._newest if node.alive]
        if not self._newest:
            self._candidates = []  # nothing is left to expand until the round ends
            return None
        return self.tree.draft_request(self._newest, self.children)

    def on_draft(self, request: DraftRequest, output: DraftOutput) -> None:
        parents = {node.id: node for node in self._newest}
        if any(node.id not in parents for node in request.nodes):
            return  # the pass belongs to a round that has ended
        scores = output.scores + np.array([[parents[n.id].score] for n in request.nodes])
        order = np.argsort(-scores, axis=None, kind="stable")
        columns = scores.shape[1]
        self._candidates = [
            (float(scores.flat[i]), parents[request.nodes[i // columns].id], int(output.tokens.flat[i]))
            for i in order.tolist() if np.isfinite(scores.flat[i])  # not absent
        ]
        # Added to the tree now, so that an unsent successor still is a hit.
        self._adopt(self._candidates)

    def send(self, nodes: Sequence[Node], root: bool) -> Segment:
        self._number(nodes, root)
        return self.builder.seal(self.segment_taps)

    def _adopt(self, candidates: list[Candidate]) -> None:
        living = (c for c in candidates if c[1].alive)
        for _, (score, parent, token) in zip(range(self.layer_width), living, strict=False):
            self.tree.add(parent, token, score)


@dataclass(frozen=True)
class PipeDecParameters(Parameters):
    pipedec_width: Annotated[int, "w: nodes of a layer (FlowSpec's comparison takes 16)"] = 32
    pipedec_children: Annotated[int, "c: children per node"] = 16

    def largest_segment(self) -> int:
        return max(super().largest_segment(), 1 + self.pipedec_width)


class PipeDec(LayeredStrategy):
    """An ordinary draft model's dynamic tree, one layer in every stage (PipeDec, section 3).

    The last stage's token is the root's successor: a hit keeps the subtree, a miss clears everything.  With d
    stages and a hit rate h, a timestep yields 1 / (d (1 - h) + h) tokens.
    """

    name = "pipedec"
    title = "PipeDec"
    summary = "one layer of a draft model's tree in every stage, hit or miss a timestep (PipeDec)"
    parameters = PipeDecParameters
    params: PipeDecParameters
    drafter = LM.name

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self.layer_width, self.children = self.params.pipedec_width, self.params.pipedec_children


class Chain(LayeredStrategy):
    """A single chain that fills the pipeline and empties at a miss.

    PipeDec with layers of one node does the same, and so does leyten/shard.
    """

    name = "chain"
    title = "chain in flight"
    summary = "one chain of drafts kept in flight, flushed on a miss (shard)"
