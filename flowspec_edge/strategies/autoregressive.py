"""Plain pipeline decoding (AR-PP): one token through the pipeline at a time, no draft."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.base import Pipeline, Strategy
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.tree.draft_api import Commit
from flowspec_edge.tree.segment_builder import SegmentBuilder


class Autoregressive(Strategy):
    name = "autoregressive"
    summary = "plain pipeline decoding: one token at a time, no draft"
    drafter = None

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self._unsent: int | None = None  # the newest token, until it is sent
        self._position = 0

    def start(self, token: int, position: int) -> None:
        self._unsent, self._position = token, position

    def row_probabilities(self, limit: int) -> Sequence[float]:
        return () if self._unsent is None else (1.0,)

    def next_segment(self, rows: int | None = None) -> Segment | None:
        if self._unsent is None:
            return None
        self.builder.add(self._unsent, self._position, committed=True)
        self._unsent = None
        return self.builder.seal()

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        if not numbers:
            return []
        self.counters.verified += 1
        self.counters.rounds += 1
        self._unsent = successors[0]
        self._position += 1
        return [Commit(successors[0], numbers[0])]
