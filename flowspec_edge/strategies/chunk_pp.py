"""Chunk-PP: EAGLE-2's tree in equal chunks through the pipeline, one synchronous walk a round.

The baseline of the FlowSpec paper (section V-A): the initial tree is drafted whole, cut unsorted
(layer order) into N + 1 equal segments; D0 waits for all of them, walks once, and starts anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.requests import Commit


class ChunkPP(TreeStrategy):
    """Draft, send everything, wait for everything, accept."""

    name = "chunk_pp"
    summary = "the tree in N+1 equal chunks, accepted when all are back (FlowSpec's baseline)"
    order = "layer"

    @property
    def max_in_flight(self) -> int:
        """All chunks of a round: nothing is learned from the first before the last is back."""
        return self.pipeline.stages + 1

    def begin_round(self) -> None:
        super().begin_round()
        self._chunks: deque[list[Node]] | None = None
        self._outstanding = 0

    def next_segment(self) -> Segment | None:
        if self.growth is not None and not self.growth.done:
            return None
        first = self._chunks is None
        if self._chunks is None:
            nodes = self.tree.take(self.tree.size)
            # The root counts as one row of the N + 1 equal chunks and leads the first of them.
            size = math.ceil((len(nodes) + 1) / (self.pipeline.stages + 1))
            self._chunks = deque([nodes[: size - 1]])
            self._chunks.extend(nodes[i : i + size] for i in range(size - 1, len(nodes), size))
        if not self._chunks:
            return None
        self._outstanding += 1
        return self._send(self._chunks.popleft(), root=first)

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self._record(numbers, successors)
        self._outstanding -= 1
        if self._outstanding or self._chunks:
            return []
        return self._walk()[0]
