"""The model-independent part of a drafter: queue, root, cache, ranking.

The root's row is the last text row, so expanding the root again without new text costs nothing.  Any other
row sees the text, its expanded ancestors and itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.drafting.base import NO_ROOT, Drafter, parent_missing_error, root_misplaced_error
from flowspec_edge.drafting.tree_cache import CacheShape, TreeCache
from flowspec_edge.errors import ProtocolError
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.sampling.sampler import rank_children
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest

Rows = tuple[list[int], list[DraftNode], Tensor]  # text rows, nodes, the cache's mask


class TreeDrafter(Drafter, ABC):
    """A subclass computes the rows (:meth:`_rows`)."""

    taps: tuple[int, ...] = ()
    rows_behind = 0  # how many fewer rows than tokens the text has

    def __init__(self, shape: CacheShape, logits: Callable[[Tensor], Tensor],
                 draft_vocabulary: DraftVocabulary | None = None) -> None:
        """``logits`` maps row outputs [n, H] to [n, V], or [n, D] over ``draft_vocabulary``."""
        self._cache = TreeCache(shape)
        self._logits = logits
        self._draft_vocabulary = draft_vocabulary
        self.reset(Sampling(), "draft", 1.0)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._ranking = (sampling, rank, tau)
        self._cache.reset()
        self._root = NO_ROOT
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
        self._root = NO_ROOT
        self._text_length = tokens
        self._outputs.clear()
        return True

    def _forget_rows(self, queued: int) -> None:
        """Keep only the first ``queued`` of the text rows that are not computed yet."""
        self._queue = self._queue[:queued]

    @abstractmethod
    def _rows(self, text: list[int], nodes: list[DraftNode], mask: Tensor) -> Tensor:
        """Outputs [len(text) + len(nodes), H] of the queued text rows, then of ``nodes``."""

    @torch.inference_mode()
    def expand(self, request: DraftRequest) -> DraftOutput:
        rows = self._begin(request)
        if rows is not None:
            self._store(rows, self._rows(*rows))
        if not request.nodes:
            return DraftOutput.empty(0, 0)
        return self._rank(request, self._logits(self._asked(request)))

    def shares_passes_with(self, other: Drafter) -> bool:
        """Whether :meth:`expand_together` takes both."""
        return False

    @staticmethod
    @torch.inference_mode()
    def expand_together(requests: Sequence[tuple[TreeDrafter, DraftRequest]]) -> list[DraftOutput]:
        """:meth:`expand` for requests, which have nodes, of drafters that share passes: in one pass."""
        begun = [(drafter, rows) for drafter, request in requests if (rows := drafter._begin(request))]
        if begun:
            outputs = begun[0][0]._rows_together(begun)
            for (drafter, rows), output in zip(begun, outputs, strict=True):
                drafter._store(rows, output)
        asked = [drafter._asked(request) for drafter, request in requests]
        logits = requests[0][0]._logits(torch.cat(asked))
        if len({(request.children, *drafter._order()) for drafter, request in requests}) == 1:
            nodes = tuple(node for _, request in requests for node in request.nodes)
            drafter, first = requests[0]
            return drafter._rank(replace(first, nodes=nodes), logits).split([len(rows) for rows in asked])
        parts = logits.split([len(rows) for rows in asked])
        return [drafter._rank(request, own) for (drafter, request), own in zip(requests, parts, strict=True)]

    def _order(self) -> tuple[object, ...]:
        """What decides on the order of children; drafters that share passes have one vocabulary."""
        sampling, rank, tau = self._ranking
        return (sampling, rank, tau) if rank == "noise" and not sampling.greedy else ()

    def _rows_together(self, begun: Sequence[tuple[TreeDrafter, Rows]]) -> list[Tensor]:
        """:meth:`_rows` of drafters that share passes; here one after the other."""
        return [drafter._rows(*rows) for drafter, rows in begun]

    def _begin(self, request: DraftRequest) -> Rows | None:
        """Make room for the rows to compute; None if there are none."""
        if request.root != self._root:
            self._reroot(request.root)
        self._check(request)
        nodes = [node for node in request.nodes if node.id != self._root]
        text, self._queue = self._queue, []
        if not text and not nodes:
            return None
        return text, nodes, self._cache.begin(len(text), [(n.id, n.parent) for n in nodes])

    def _store(self, rows: Rows, outputs: Tensor) -> None:
        """``outputs`` [n, H]: of the text rows, then of the nodes."""
        text, nodes, _ = rows
        if text:
            self._outputs[self._root] = outputs[len(text) - 1].clone()  # a view would keep all rows
        for node, output in zip(nodes, outputs[len(text) :], strict=True):
            self._outputs[node.id] = output

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
                    raise parent_missing_error(node)
            elif node.position != self._text_length - 1:
                raise root_misplaced_error(node, self._text_length)
            elif not self._queue and self._root not in self._outputs:
                raise ProtocolError("nothing has been committed that the draft model could continue")

    def _asked(self, request: DraftRequest) -> Tensor:
        """Outputs [n, H] of the request's nodes."""
        return torch.stack([self._outputs[node.id] for node in request.nodes])

    def _rank(self, request: DraftRequest, logits: Tensor) -> DraftOutput:
        positions = np.fromiter((node.position for node in request.nodes), np.int64)
        sampling, rank, tau = self._ranking
        return DraftOutput(*rank_children(logits, positions, request.children, sampling, rank, tau,
                                        self._draft_vocabulary))
