"""What a strategy asks of a drafter, and what it gets back.

Shared words of ``strategies`` and ``drafting``, which do not import one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ABSENT = -1  # in the place of a child's token


@dataclass(frozen=True, slots=True)
class DraftNode:
    """One tree node to expand: its identity, its parent's, its token and absolute position.

    ``id`` is unique within a session and a child's id is larger than its parent's.  The root's
    token is the newest committed one; its parent is -1.  ``number`` is the ledger's, -1 if the
    node was not sent: by it a drafter that reads taps knows the node's hidden states.
    """

    id: int
    parent: int
    token: int
    position: int
    number: int = -1


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One forward pass of the drafter: expand ``nodes``, ``children`` best children each.

    ``root`` is the id of the current root.  A node other than the root may be asked for only
    after its parent (the root, or a node expanded by an earlier request that still lies below
    the root).  Expanding a node again replaces what the drafter remembered of it.
    """

    root: int
    nodes: tuple[DraftNode, ...]
    children: int


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """The children of each node of a request, best first.

    tokens [n, k] int32; scores [n, k] float64, log confidences (at most 0) of each child alone.

    A drafter that knows fewer than k children of a node leaves the rest of its row *absent*: the
    score is -inf, the token means nothing (``ABSENT``).  No absent child may enter a tree.
    """

    tokens: NDArray[np.int32]
    scores: NDArray[np.float64]

    @classmethod
    def empty(cls, nodes: int, children: int) -> Expansion:
        """All children absent; for a drafter to fill in."""
        return cls(np.full((nodes, children), ABSENT, np.int32), np.full((nodes, children), -np.inf))


@dataclass(frozen=True, slots=True)
class Commit:
    """One token that became part of the text.

    ``source`` is the number of the row that predicted it, ``drafted`` whether the tree held it.
    """

    token: int
    source: int
    drafted: bool = False
