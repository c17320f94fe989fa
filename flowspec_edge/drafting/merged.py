"""Looked-up continuations among another drafter's children.

Knows two drafters and how their children become one ranked list.  Does not know what the first one
is: an EAGLE head, a small model or SPD's module.

What is looked up is a child like any other: if it is expanded, both drafters are asked for its
children.  So a looked-up passage becomes a branch that the model goes on from, and the model's own
branches reach into looked-up passages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.ngram import NgramDrafter
from flowspec_edge.messages import Tap
from flowspec_edge.sampling import Rank, Sampling
from flowspec_edge.tree.requests import DraftRequest, Expansion


class MergedDrafter:
    """Implements :class:`flowspec_edge.drafting.base.Drafter` with ``base`` and ``looked_up``.

    Of both drafters' children of a node the best by score stay, as many as were asked for; a child
    that both know has the better of its two scores.  The scores of one node may sum to more than
    1: each estimates its own child's chance.
    """

    def __init__(self, base: Drafter, looked_up: NgramDrafter) -> None:
        self._base = base
        self._looked_up = looked_up

    @property
    def taps(self) -> tuple[int, ...]:
        return self._base.taps

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._base.reset(sampling, rank, tau)
        self._looked_up.reset(sampling, rank, tau)

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        return (self._base.rewind(tokens, sampling, rank, tau)
                and self._looked_up.rewind(tokens, sampling, rank, tau))

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._base.commit(tokens, features, rows)
        self._looked_up.commit(tokens, features, rows)

    def tap(self, message: Tap) -> None:
        self._base.tap(message)

    def expand(self, request: DraftRequest) -> Expansion:
        return merge(self._base.expand(request), self._looked_up.expand(request), request.children)


def merge(first: Expansion, second: Expansion, children: int) -> Expansion:
    """The ``children`` best of both for every node [n, children]; of equals, those of ``first``."""
    merged = Expansion.empty(len(first.tokens), children)
    for row in range(len(first.tokens)):
        best: dict[int, float] = {}
        for found in (first, second):
            for token, score in zip(found.tokens[row].tolist(), found.scores[row].tolist(), strict=True):
                if np.isfinite(score) and score > best.get(token, -np.inf):
                    best[token] = score
        ranked = sorted(best.items(), key=lambda child: -child[1])[:children]
        for place, (token, score) in enumerate(ranked):
            merged.tokens[row, place], merged.scores[row, place] = token, score
    return merged
