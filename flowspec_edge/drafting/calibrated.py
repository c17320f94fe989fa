"""A draft model made worse or better than it is, for predictions about other models and heads.

A head over the demonstration model's small vocabulary has the right token among ten children far more often
than published heads, so rounds last much longer.  Here the right child is missing at some positions, or comes
first at some, the same ones for every strategy and at every attempt.  Texts do not change: only drafts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.drafting.base import NO_ROOT, Drafter
from flowspec_edge.messages import Tap
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest

if TYPE_CHECKING:
    from torch import Tensor

_LEAST = 1e-3  # confidence in a right token where the base has no child, and in all but a perfect draft's


class CalibratedDrafter(Drafter):
    """A drafter whose acceptance is lower or higher than that of the head behind it.

    Below the head's own acceptance, it drops right children that ``base`` ranks second or lower: the next best take
    their places.  Above it, it puts the right token first: a mixture with a perfect draft model.
    """

    def __init__(self, base: Drafter, text: Sequence[int], share: float, seed: int) -> None:
        """Choose the positions at which drafts change.

        text   the prompt and plain decoding's answer: the right tokens
        share  up to 1: of the positions at which such a child stays; beyond it, what is above 1 is the share
               of the positions at which the right token comes first: at 2 everywhere.  The first child's
               confidence rises with it, everywhere, so that on average it is as often right as it says
        seed   which positions
        """
        self._base, self._text = base, list(text)
        draws = np.random.default_rng(seed).random(len(self._text) + 1)
        self._is_kept: NDArray[np.bool_] = draws < share
        self._first: NDArray[np.bool_] = draws < share - 1
        self._better = min(max(share - 1, 0.0), 1 - _LEAST)
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

    def scores_only(self, request: DraftRequest) -> bool:
        return self._base.scores_only(request)

    def expand(self, request: DraftRequest) -> DraftOutput:
        if request.root != self._root:
            self._root = request.root
            # A child's id is larger than its parent's, so nothing at or below this id is needed.
            self._right = {node: right for node, right in self._right.items() if node > request.root}
        wider = self._base.expand(replace(request, children=request.children + 1))
        output = DraftOutput(wider.tokens[:, :-1].copy(), wider.scores[:, :-1].copy(), wider.beyond)
        for row, node in enumerate(request.nodes):
            following = node.position + 1
            if not self._is_right(node) or following >= len(self._text):
                continue
            right = self._text[following]
            [ranks] = np.nonzero(output.tokens[row] == right)
            rank = ranks[0] if len(ranks) else request.children - 1
            if self._first[following]:  # with the best score; the others move down by one
                output.tokens[row, 1 : rank + 1] = output.tokens[row, :rank].copy()
                output.tokens[row, 0] = right
                output.scores[row, 0] = max(output.scores[row, 0], np.log(_LEAST))
            elif len(ranks) and rank and not self._is_kept[following]:
                output.tokens[row, rank:] = wider.tokens[row, rank + 1 :]
                output.scores[row, rank:] = wider.scores[row, rank + 1 :]
        if self._better:
            exists = np.isfinite(output.scores[:, 0])
            first = self._better + (1 - self._better) * np.exp(output.scores[exists, 0])
            output.scores[:] += np.log(1 - self._better)
            output.scores[exists, 0] = np.log(first)
        return output

    def _is_right(self, node: DraftNode) -> bool:
        """Whether the path that ends with ``node`` is the text; asked of parents before their children."""
        continues = node.parent == self._root or self._right.get(node.parent, False)
        text = self._text[node.position : node.position + 1]
        self._right[node.id] = node.id == self._root or (continues and text == [node.token])
        return self._right[node.id]
