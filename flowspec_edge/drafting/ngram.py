"""Drafting by prompt look-up (``tree.text_index``), alone or merged with a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from flowspec_edge.drafting.base import NO_ROOT, Drafter, parent_missing_error, root_misplaced_error
from flowspec_edge.messages import Tap
from flowspec_edge.sampling.rule import Rank, Sampling, scores_from_probabilities
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest
from flowspec_edge.tree.text_index import TextIndex

if TYPE_CHECKING:
    from torch import Tensor


class NgramDrafter(Drafter):
    """Children that the text does not offer are absent."""

    taps = ()

    def __init__(self, longest: int, shortest: int) -> None:
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
        self._root = NO_ROOT
        self._paths: dict[int, tuple[int, ...]] = {}  # by node: the last tokens of its path

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        for token in tokens:
            self._index.append(token)

    def expand(self, request: DraftRequest) -> DraftOutput:
        if request.root != self._root:
            self._root = request.root
            # A child's id is larger than its parent's, so nothing at or below this id is needed.
            self._paths = {node: path for node, path in self._paths.items() if node > request.root}
        children = DraftOutput.empty(len(request.nodes), request.children)
        for row, node in enumerate(request.nodes):
            candidates = self._index.candidates(self._path(node), request.children)
            if not candidates:
                continue
            ids = np.array([token for token, _ in candidates], np.int32)
            ranks = scores_from_probabilities(ids, np.array([p for _, p in candidates]), node.position,
                                              self._sampling, self._rank)
            best = np.argsort(-ranks, kind="stable")
            children.tokens[row, : len(ids)] = ids[best]
            children.scores[row, : len(ids)] = ranks[best]
        return children

    def _path(self, node: DraftNode) -> tuple[int, ...]:
        index = self._index
        if node.id == self._root:
            if node.position != index.length - 1:
                raise root_misplaced_error(node, index.length)
            return index.newest
        above = index.newest if node.parent == self._root else self._paths.get(node.parent)
        if above is None:
            raise parent_missing_error(node)
        path = self._paths[node.id] = (*above, node.token)[-index.longest :]
        return path


class MergedDrafter(Drafter):
    """The best children of two drafters by score; duplicates have the better score, so sums may exceed 1.

    Both expand every node, so the model continues looked-up passages, and look-ups the model's branches.
    """

    def __init__(self, base: Drafter, lookup: NgramDrafter) -> None:
        self._base = base
        self._lookup = lookup

    @property
    def taps(self) -> tuple[int, ...]:
        return self._base.taps

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._base.reset(sampling, rank, tau)
        self._lookup.reset(sampling, rank, tau)

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        return (self._base.rewind(tokens, sampling, rank, tau)
                and self._lookup.rewind(tokens, sampling, rank, tau))

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._base.commit(tokens, features, rows)
        self._lookup.commit(tokens, features, rows)

    def tap(self, message: Tap) -> None:
        self._base.tap(message)

    def scores_only(self, request: DraftRequest) -> bool:
        return self._base.scores_only(request)

    def expand(self, request: DraftRequest) -> DraftOutput:
        return merge(self._base.expand(request), self._lookup.expand(request), request.children)


def merge(first: DraftOutput, second: DraftOutput, children: int) -> DraftOutput:
    """Return the ``children`` best of both for every node [n, children]; of equals, those of ``first``."""
    merged = replace(DraftOutput.empty(len(first.tokens), children), beyond=first.beyond)
    for row in range(len(first.tokens)):
        best: dict[int, float] = {}
        for output in (first, second):
            for token, score in zip(output.tokens[row].tolist(), output.scores[row].tolist(), strict=True):
                if np.isfinite(score) and score > best.get(token, -np.inf):
                    best[token] = score
        ranked = sorted(best.items(), key=lambda child: -child[1])[:children]
        for column, (token, score) in enumerate(ranked):
            merged.tokens[row, column], merged.scores[row, column] = token, score
    return merged
