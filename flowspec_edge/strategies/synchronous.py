"""Synchronous tree methods: draft a tree, verify all of it, accept once, start anew."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flowspec_edge.errors import UsageError
from flowspec_edge.messages import Segment
from flowspec_edge.model.draft_kinds import LM
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_api import Commit
from flowspec_edge.tree.draft_tree import DraftTree, Node, TreeExpansion
from flowspec_edge.tree.segment_builder import SegmentBuilder


class ChunkPP(TreeStrategy):
    """EAGLE-2's tree in N + 1 equal chunks, in layer order; D0 waits for all (FlowSpec's baseline, V-A)."""

    name = "chunk_pp"
    title = "Chunk-PP"
    summary = "the tree in N+1 equal chunks, accepted when all are back (FlowSpec's baseline)"
    order = "layer"

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self._chunks: deque[list[Node]] | None = None  # unsent ones; None until the tree is complete
        self._outstanding = 0

    @property
    def max_in_flight(self) -> int:
        """All chunks of a round: acceptance waits for the last."""
        return self.pipeline.stages + 1

    def begin_round(self) -> None:
        super().begin_round()
        self._chunks = None
        self._outstanding = 0

    def next_segment(self, rows: int | None = None) -> Segment | None:
        if self.drafting:
            return None
        first = self._chunks is None
        if self._chunks is None:
            nodes = self.tree.pop_unsent(self.tree.size)
            # The root counts as one row of the N + 1 equal chunks and leads the first of them.
            size = math.ceil((len(nodes) + 1) / (self.pipeline.stages + 1))
            self._chunks = deque([nodes[: size - 1]])
            self._chunks.extend(nodes[i : i + size] for i in range(size - 1, len(nodes), size))
        if not self._chunks:
            return None
        self._outstanding += 1
        return self.send(self._chunks.popleft(), root=first)

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self.record(numbers, successors)
        self._outstanding -= 1
        return [] if self._outstanding or self._chunks else self.accept()[0]


class WholeTree(TreeStrategy):
    """The whole tree is one segment; D0 and the target take turns."""

    @property
    def max_in_flight(self) -> int:
        return 1

    def next_segment(self, rows: int | None = None) -> Segment | None:
        if self.tree.root.number >= 0 or self.drafting:
            return None
        return self.send(self.tree.pop_unsent(self.tree.size), root=True)


@dataclass(frozen=True)
class SpeculativeParameters(Parameters):
    speculative_gamma: Annotated[int, "draft tokens a verification"] = 4

    def largest_segment(self) -> int:
        return max(super().largest_segment(), 1 + self.speculative_gamma)


class Speculative(WholeTree):
    """Plain speculative decoding (Leviathan et al.): one chain of gamma tokens per round."""

    name = "speculative"
    summary = "a draft model's chain, verified in one go, by turns (PEARL's and PipeInfer's baseline)"
    parameters = SpeculativeParameters
    params: SpeculativeParameters
    drafter = LM.name

    def begin_round(self) -> None:
        gamma = self.params.speculative_gamma
        self.expand([self.tree.root], gamma, 1, gamma)


class StaticExpansion(TreeExpansion):
    """Expands every node of level i into ``branching[i]`` children."""

    def __init__(self, tree: DraftTree, branching: tuple[int, ...]) -> None:
        sizes = [math.prod(branching[: i + 1]) for i in range(len(branching))]
        super().__init__(tree, [tree.root], len(branching), width=max(sizes), keep=sum(sizes))
        self._branching = branching

    def _children(self) -> int:
        return self._branching[-self._levels]


@dataclass(frozen=True)
class STPPParameters(Parameters):
    stpp_branching: Annotated[str, "children per node, level by level (SpecInfer's)"] = "1,1,3,1,1,1,1,1"

    def levels(self) -> tuple[int, ...]:
        try:
            levels = tuple(int(part) for part in self.stpp_branching.split(","))
        except ValueError:
            levels = ()
        if not levels or min(levels) < 1:
            raise UsageError("stpp_branching must be positive numbers separated by commas, "
                             f"not {self.stpp_branching!r}")
        return levels

    def largest_segment(self) -> int:
        levels = self.levels()
        nodes = sum(math.prod(levels[: i + 1]) for i in range(len(levels)))
        return max(super().largest_segment(), 1 + nodes)


class STPP(WholeTree):
    """A fixed tree shape, whatever the scores; by default SpecInfer's."""

    name = "stpp"
    title = "STPP"
    summary = "a static token tree, verified whole through the pipeline (PipeDec's baseline)"
    parameters = STPPParameters
    params: STPPParameters
    drafter = LM.name

    def begin_round(self) -> None:
        self.expansion = StaticExpansion(self.tree, self.params.levels())


class Megatron(WholeTree):
    """Two all-reduces a layer."""

    name = "megatron"
    title = "Megatron-LM"
    summary = "tensor parallelism, in virtual time only: computed whole, charged as a group (Megatron-LM)"
    parallelism = "megatron"


class Galaxy(WholeTree):
    """Ring collectives overlap with the matrix products; norms and residuals are split over the rows."""

    name = "galaxy"
    title = "Galaxy"
    summary = "as megatron, with ring collectives that overlap with compute (Galaxy)"
    parallelism = "galaxy"
