"""The part of a drafter that does not depend on its model: queue, root, cache, ranking.

Knows when rows are new, superseded or dead.  Does not know how a row is computed: that is what
``EagleDrafter`` and ``LMDrafter`` add.

Text rows come in by :meth:`TreeDrafter.commit` and are computed by the next ``expand``.  The row
of the root is the last row of the text, so asking for the root again without new text costs
nothing.  The row of any other node sees the text, its expanded ancestors below the root, itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.drafting.tree_cache import CacheShape, TreeCache
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Tap
from flowspec_edge.sampler import rank_children
from flowspec_edge.sampling import DraftVocabulary, Rank, Sampling
from flowspec_edge.tree.requests import DraftNode, DraftRequest, Expansion

_NO_ROOT = -2  # no node has this id (-1 is the root's parent)


class TreeDrafter(ABC):
    """Implements :class:`flowspec_edge.drafting.base.Drafter` on one model's rows."""

    taps: tuple[int, ...] = ()
    rows_behind = 0  # the text has so many tokens more than rows

    def __init__(self, shape: CacheShape, logits: Callable[[Tensor], Tensor],
                 drafted: DraftVocabulary | None = None) -> None:
        """``logits`` maps row outputs [n, H] to logits [n, V], or [n, D] over the ``drafted`` tokens."""
        self._cache = TreeCache(shape)
        self._logits = logits
        self._drafted = drafted
        self.reset(Sampling(), "draft", 1.0)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._ranking = (sampling, rank, tau)
        self._cache.reset()
        self._root = _NO_ROOT
        self._text_length = 0
        self._queue: list[int] = []  # tokens of text rows that no pass has computed yet
        self._outputs: dict[int, Tensor] = {}  # row output [H] of the root and of every tree row

    @torch.inference_mode()
    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        if not 0 < tokens <= self._text_length:
            return False
        rows = tokens - self.rows_behind
        self._forget_rows(max(0, rows - self._cache.committed))
        self._cache.rewind(min(rows, self._cache.committed))
        self._ranking = (sampling, rank, tau)
        self._root = _NO_ROOT
        self._text_length = tokens
        self._outputs.clear()
        return True

    def _forget_rows(self, queued: int) -> None:
        """Of the text rows that no pass has computed yet only the first ``queued`` are left."""
        self._queue = self._queue[:queued]

    @abstractmethod
    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None: ...

    @abstractmethod
    def _rows(self, text: list[int], nodes: list[DraftNode], mask: Tensor) -> Tensor:
        """Outputs [len(text) + len(nodes), H] of the queued text rows, then of ``nodes``."""

    @torch.inference_mode()
    def expand(self, request: DraftRequest) -> Expansion:
        if request.root != self._root:
            self._reroot(request.root)
        self._check(request)
        nodes = [node for node in request.nodes if node.id != self._root]
        text, self._queue = self._queue, []
        if text or nodes:
            mask = self._cache.begin(len(text), [(n.id, n.parent) for n in nodes])
            outputs = self._rows(text, nodes, mask)
            if text:
                self._outputs[self._root] = outputs[len(text) - 1].clone()  # lets a prompt's rows go
            for node, output in zip(nodes, outputs[len(text) :], strict=True):
                self._outputs[node.id] = output
        return self._rank(request)

    def tap(self, message: Tap) -> None:
        """Inner hidden states are of no use to most drafters."""
        return

    def _reroot(self, root: int) -> None:
        self._root = root
        self._cache.reroot(root)
        # The new root's approximate output stays until its true row is computed: a child of it
        # may be asked for in the very pass that computes that row.
        self._outputs = {n: o for n, o in self._outputs.items() if n == root or n in self._cache}

    def _check(self, request: DraftRequest) -> None:
        for node in request.nodes:
            if node.id != self._root:
                if node.parent not in self._outputs:
                    raise ProtocolError(f"draft node {node.id} was asked for before its parent {node.parent}")
            elif node.position != self._text_length - 1:
                raise ProtocolError(
                    f"the root stands at position {node.position}, but the drafter was given a text "
                    f"of {self._text_length} tokens: tokens must be committed before they are drafted on"
                )
            elif not self._queue and self._root not in self._outputs:
                raise ProtocolError("nothing has been committed that the draft model could go on from")

    def _rank(self, request: DraftRequest) -> Expansion:
        if not request.nodes:
            return Expansion(np.empty((0, 0), np.int32), np.empty((0, 0), np.float64))
        logits = self._logits(torch.stack([self._outputs[node.id] for node in request.nodes]))
        positions = np.fromiter((node.position for node in request.nodes), np.int64)
        sampling, rank, tau = self._ranking
        return Expansion(*rank_children(logits, positions, request.children, sampling, rank, tau,
                                        self._drafted))
