"""The interface of strategies and drafters, which do not import one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ABSENT = -1  # the token of an absent child


@dataclass(frozen=True, slots=True)
class DraftNode:
    """One tree node to expand.

    id      unique within a session, larger than the parent's
    parent  -1 for the root
    number  the row's number once sent, by which drafters find its taps, else -1
    """

    id: int
    parent: int
    token: int
    position: int
    number: int = -1


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One forward pass of the drafter.

    Every node is the root, or its parent is the root or a node below it that an earlier request expanded.
    Expanding a node again replaces its former result.
    """

    root: int
    nodes: tuple[DraftNode, ...]
    children: int


@dataclass(frozen=True, slots=True, eq=False)
class DraftOutput:
    """Children per node, best first; absent ones (score -inf, token ``ABSENT``) must not enter a tree.

    tokens  [n, k] int32
    scores  [n, k] float64, log confidence (at most 0) of each child given its parent
    beyond  [n]: nodes that are too deep for the drafter below this root, to be asked for below a later one;
            None: it knows no such depth
    """

    tokens: NDArray[np.int32]
    scores: NDArray[np.float64]
    beyond: NDArray[np.bool_] | None = None

    @classmethod
    def empty(cls, nodes: int, children: int) -> DraftOutput:
        return cls(np.full((nodes, children), ABSENT, np.int32), np.full((nodes, children), -np.inf))

    def split(self, nodes: Sequence[int]) -> list[DraftOutput]:
        """Return the outputs of ``nodes[0]``, ``nodes[1]``, … nodes."""
        ends = np.cumsum(nodes)[:-1]
        beyond = [None] * len(nodes) if self.beyond is None else np.split(self.beyond, ends)
        return [DraftOutput(*arrays) for arrays in zip(np.split(self.tokens, ends), np.split(self.scores, ends),
                                                       beyond, strict=True)]


@dataclass(frozen=True, slots=True)
class Commit:
    """A token that became text.

    ``source``: number of the row that predicted the token; ``accepted``: False: not drafted, after a miss.
    """

    token: int
    source: int
    accepted: bool = False
