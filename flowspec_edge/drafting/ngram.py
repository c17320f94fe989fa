"""Drafts without a model: what followed the newest tokens where the text had them before.

Knows the paths to tree nodes, and how estimates become scores; what the text offers, and with which
probability, its index knows (``tree.text_index``).  Ignores the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Tap
from flowspec_edge.sampling import Rank, Sampling, chance_scores
from flowspec_edge.tree.requests import DraftNode, DraftRequest, Expansion
from flowspec_edge.tree.text_index import TextIndex

_NO_ROOT = -2  # no node has this id (-1 is the root's parent)


class NgramDrafter:
    """Implements :class:`flowspec_edge.drafting.base.Drafter` by looking up.

    A node has as many children as the text offers; the others are absent (``Expansion``).

    ``rank="noise"`` while sampling: see ``sampling.chance_scores``.
    """

    taps = ()

    def __init__(self, longest: int, shortest: int) -> None:
        """Contexts have shortest to longest tokens."""
        self._index = TextIndex(longest, shortest)
        self.reset(Sampling(), "draft", 1.0)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._index.reset()
        self._begin(sampling, rank)

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        if not 0 < tokens <= self._index.length:
            return False
        self._index.rewind(tokens)
        self._begin(sampling, rank)
        return True

    def _begin(self, sampling: Sampling, rank: Rank) -> None:
        self._sampling = sampling
        self._rank = rank
        self._root = _NO_ROOT
        self._paths: dict[int, tuple[int, ...]] = {}  # by node: the last tokens of its path

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        for token in tokens:
            self._index.append(token)

    def tap(self, message: Tap) -> None:
        """Hidden states are of no use here."""
        return

    def expand(self, request: DraftRequest) -> Expansion:
        if request.root != self._root:
            self._root = request.root
            # A child's id is larger than its parent's, so nothing at or below this id is needed.
            self._paths = {node: path for node, path in self._paths.items() if node > request.root}
        children = Expansion.empty(len(request.nodes), request.children)
        for row, node in enumerate(request.nodes):
            found = self._index.candidates(self._path(node), request.children)
            if not found:
                continue
            ids = np.array([token for token, _ in found], np.int32)
            ranks = chance_scores(ids, np.array([p for _, p in found]), node.position, self._sampling,
                                  self._rank)
            best = np.argsort(-ranks, kind="stable")
            children.tokens[row, : len(ids)] = ids[best]
            children.scores[row, : len(ids)] = ranks[best]
        return children

    def _path(self, node: DraftNode) -> tuple[int, ...]:
        """The last tokens of the text that ends with ``node``."""
        index = self._index
        if node.id == self._root:
            if node.position != index.length - 1:
                raise ProtocolError(
                    f"the root stands at position {node.position}, but the drafter was given a text "
                    f"of {index.length} tokens: tokens must be committed before they are drafted on"
                )
            return index.newest
        above = index.newest if node.parent == self._root else self._paths.get(node.parent)
        if above is None:
            raise ProtocolError(f"draft node {node.id} was asked for before its parent {node.parent}")
        path = self._paths[node.id] = (*above, node.token)[-index.longest :]
        return path
