"""A draft model made as fallible as a published one, for predictions about larger models.

A head over the demonstration model's small vocabulary has the right token among ten children far more often
than published heads, so rounds last much longer. Here the right child is missing at some positions, the same
ones for every strategy and at every attempt. Texts do not change: only drafts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.drafting.base import NO_ROOT, Drafter
from flowspec_edge.messages import Tap
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest


class CalibratedDrafter(Drafter):
    """Drops right children that ``base`` ranks second or lower; the next best take their places."""

    def __init__(self, base: Drafter, text: Sequence[int], share: float, seed: int) -> None:
        """text   the prompt and plain decoding's answer: the right tokens
        share  of the positions at which such a child stays, 0 to 1
        seed   which positions
        """
        self._base, self._text = base, list(text)
        self._kept: NDArray[np.bool_] = np.random.default_rng(seed).random(len(self._text) + 1) < share
        self._begin()

    @property
    def taps(self) -> tuple[int, ...]:
        return self._base.taps

    def _begin(self) -> None:
        self._root = NO_ROOT
        self._right: dict[int, bool] = {}  # by node below the root: whether its path is the text

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._base.reset(sampling, rank, tau)
        self._begin()

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        self._begin()
        return self._base.rewind(tokens, sampling, rank, tau)

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._base.commit(tokens, features, rows)

    def tap(self, message: Tap) -> None:
        self._base.tap(message)

    def expand(self, request: DraftRequest) -> DraftOutput:
        if request.root != self._root:
            self._root = request.root
            # A child's id is larger than its parent's, so nothing at or below this id is needed.
            self._right = {node: right for node, right in self._right.items() if node > request.root}
        wider = self._base.expand(replace(request, children=request.children + 1))
        output = DraftOutput(wider.tokens[:, :-1].copy(), wider.scores[:, :-1].copy())
        for row, node in enumerate(request.nodes):
            [ranks] = np.nonzero(output.tokens[row] == self._missing_after(node))
            if len(ranks) and (rank := ranks[0]):
                output.tokens[row, rank:] = wider.tokens[row, rank + 1 :]
                output.scores[row, rank:] = wider.scores[row, rank + 1 :]
        return output

    def _missing_after(self, node: DraftNode) -> int:
        """The right token after a node if it is to be missing, else one that no child is."""
        text, following = self._text, node.position + 1
        continues = node.parent == self._root or self._right.get(node.parent, False)
        right = node.id == self._root or (continues and text[node.position:following] == [node.token])
        self._right[node.id] = right
        if not right or following >= len(text) or self._kept[following]:
            return NO_ROOT
        return self._text[following]
