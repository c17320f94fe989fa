"""Plain pipeline decoding (AR-PP): one token through the pipeline at a time, no draft."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.base import Strategy
from flowspec_edge.tree.requests import Commit


class Autoregressive(Strategy):
    """Every round is one token: send the root, wait, the next token is the next root."""

    name = "autoregressive"
    summary = "plain pipeline decoding: one token at a time, no draft"
    drafter = None

    def start(self, token: int, position: int) -> None:
        self._root: tuple[int, int] | None = (token, position)
        self._position = position

    def next_segment(self) -> Segment | None:
        if self._root is None:
            return None
        token, position = self._root
        self._root = None
        self.ledger.add(token, position, committed=True)
        return self.ledger.seal()

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        if not numbers:
            return []
        self.counters.verified += 1
        self._position += 1
        self._root = (successors[0], self._position)
        self.counters.rounds += 1
        return [Commit(successors[0], numbers[0])]
