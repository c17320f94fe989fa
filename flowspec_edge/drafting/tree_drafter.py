"""The model-independent part of a drafter: queue, root, cache, ranking.

The root's row is the last text row, so expanding the root again without new text costs nothing.  Any other
row sees the text, its expanded ancestors and itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.drafting.base import NO_ROOT, Drafter, parent_missing_error, root_misplaced_error
from flowspec_edge.drafting.recorded import MOST_CHILDREN, WARM_ROWS, PassInputs, PassModel, RecordedPasses, fitting
from flowspec_edge.drafting.tree_cache import CacheMemory, CacheShape, Placed, TreeCache
from flowspec_edge.errors import ProtocolError
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.sampling.sampler import fetched_children, rank_children
from flowspec_edge.stage.layers.attention import BatchCache, BatchMask
from flowspec_edge.stage.layers.kv_cache import KVPass
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest
from flowspec_edge.util.tensors import indices


@dataclass(frozen=True, eq=False)
class Rows:
    """One session's rows in a pass: those of text, then those of tree nodes."""

    text: list[int]
    nodes: list[DraftNode]
    placed: Placed

    def __len__(self) -> int:
        return len(self.placed.rows)


class TreeDrafter(Drafter, ABC):
    """A subclass says what goes into a pass (:meth:`_inputs`)."""

    taps: tuple[int, ...] = ()
    rows_behind = 0  # how many fewer rows than tokens the text has

    def __init__(self, shape: CacheShape, model: PassModel,
                 draft_vocabulary: DraftVocabulary | None = None, memory: CacheMemory | None = None,
                 recorded: RecordedPasses | None = None) -> None:
        """Begin a session without text.

        model     computes passes; its logits are over ``draft_vocabulary``, if that is given
        memory    that all sessions of the model share; None: one of its own, which grows
        recorded  passes over it
        """
        self._cache = TreeCache(shape, memory)
        self._recorded = recorded or {}
        self.pass_model, self._logits = model, model.logits
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
    def _inputs(self, rows: Rows) -> PassInputs:
        """Return the inputs of the queued text rows, whose states are used up, then of the nodes."""

    def _compute(self, parts: Sequence[tuple[TreeDrafter, Rows, PassInputs]]) -> list[Tensor]:
        """Compute the outputs [n, H] of each drafter's rows in one pass; all share passes with this drafter."""
        model, device = self.pass_model, self.shape.device
        counts = [len(rows) for _, rows, _ in parts]
        tokens = [token for *_, inputs in parts for token in inputs.tokens]
        position_list = [position for *_, inputs in parts for position in inputs.positions]
        model.reach(max(position_list))
        positions = indices(position_list, device)
        state_parts = [states for *_, inputs in parts for states in inputs.states]
        states = (state_parts[0] if len(state_parts) == 1 else torch.cat(state_parts)) if state_parts else None
        embedded = indices(tokens, device) if model.embed is None else model.embed(torch.tensor(tokens))
        mask, cache = self._mask_and_cache(parts, counts)
        return list(model.run(states, embedded, positions, mask, cache).split(counts))

    def _mask_and_cache(self, parts: Sequence[tuple[TreeDrafter, Rows, PassInputs]], counts: Sequence[int]
                        ) -> tuple[Any, Any]:
        """Return the pass's mask and cache: of one memory, or session by session."""
        shape, memory = self.shape, self._cache.memory
        if memory.shared or len(parts) == 1:
            joined_inputs = joined([inputs for *_, inputs in parts])
            return (shape.mask(joined_inputs.visible),
                    KVPass(memory.cache, indices(joined_inputs.rows, shape.device), joined_inputs.visible.shape[1]))
        return (BatchMask([drafter._cache.mask(rows.placed) for drafter, rows, _ in parts], counts),
                BatchCache([drafter._cache.for_pass(rows.placed) for drafter, rows, _ in parts], counts))

    @property
    def shape(self) -> CacheShape:
        return self._cache.shape

    @torch.inference_mode()
    def expand(self, request: DraftRequest) -> DraftOutput:
        if request.nodes:
            return self.expand_together([(self, request)])[0]
        if rows := self._begin(request):
            self._store(rows, self._compute([(self, rows, self._inputs(rows))])[0])
        return DraftOutput.empty(0, 0)

    @staticmethod
    @torch.inference_mode()
    def expand_together(requests: Sequence[tuple[Any, DraftRequest]]) -> list[DraftOutput]:
        """Expand the nodes of several drafters in one pass, as ``Drafter.expand_together``."""
        begun = [(drafter, drafter._begin(request)) for drafter, request in requests]
        parts = [(drafter, rows, drafter._inputs(rows)) for drafter, rows in begun if rows]
        first, first_request = requests[0]
        graphs = fitting(first._recorded, sum(len(rows) for _, rows, _ in parts)) if parts else None
        ranked_rows: list[int] = []
        if graphs:
            ranked_rows = _ranked_rows(requests, begun)
            outputs = graphs.run(joined([inputs for *_, inputs in parts]), ranked_rows)
            computed = list(outputs.clone().split([len(rows) for _, rows, _ in parts]))
        else:
            computed = parts[0][0]._compute(parts) if parts else []  # a lone part has a cache of its own
        for (drafter, rows, _), output in zip(parts, computed, strict=True):
            drafter._store(rows, output)
        counts = [len(request.nodes) for _, request in requests]
        if graphs and ranked_rows:
            logits = graphs.logits()[: sum(counts)]
            if all(not drafter._order() and request.children <= MOST_CHILDREN for drafter, request in requests):
                ids, scores = fetched_children([graphs.ranked()], first._draft_vocabulary)
                ends = np.cumsum(counts)
                return [DraftOutput(ids[end - n : end, :k], scores[end - n : end, :k]) for end, n, k in
                        zip(ends, counts, (request.children for _, request in requests), strict=True)]
        else:
            node_outputs = [drafter._select_outputs(request) for drafter, request in requests]
            logits = first._logits(node_outputs[0] if len(node_outputs) == 1 else torch.cat(node_outputs))
        if len({(request.children, *drafter._order()) for drafter, request in requests}) == 1:
            nodes = tuple(node for _, request in requests for node in request.nodes)
            return first._rank(replace(first_request, nodes=nodes), logits).split(counts)
        return [drafter._rank(request, part) for (drafter, request), part in
                zip(requests, logits.split(counts), strict=True)]

    def _order(self) -> tuple[object, ...]:
        """Return what decides on the order of children; drafters that share passes have one vocabulary."""
        sampling, rank, tau = self._ranking
        return (sampling, rank, tau) if rank == "noise" and not sampling.greedy else ()

    def _begin(self, request: DraftRequest) -> Rows | None:
        """Make room for the rows to compute; None if there are none."""
        if request.root != self._root:
            self._reroot(request.root)
        self._check(request)
        nodes = [node for node in request.nodes if node.id != self._root]
        while self._cache.memory.shared and len(self._queue) > max(1, WARM_ROWS - len(nodes)):
            # So that no pass takes more memory than the first ones.  The root's row is in the last one.
            rows = self._take(min(WARM_ROWS, len(self._queue) - 1), [])
            self._compute([(self, rows, self._inputs(rows))])
        return self._take(len(self._queue), nodes) if self._queue or nodes else None

    def _take(self, count: int, nodes: list[DraftNode]) -> Rows:
        """Place the first ``count`` text rows of the queue, and ``nodes``."""
        text, self._queue = self._queue[:count], self._queue[count:]
        return Rows(text, nodes, self._cache.begin(len(text), [(n.id, n.parent) for n in nodes]))

    def _store(self, rows: Rows, outputs: Tensor) -> None:
        """Store ``outputs`` [n, H], those of the text rows, then of the nodes."""
        text, nodes = rows.text, rows.nodes
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

    def _select_outputs(self, request: DraftRequest) -> Tensor:
        """Return the outputs [n, H] of the request's nodes."""
        return torch.stack([self._outputs[node.id] for node in request.nodes])

    def _rank(self, request: DraftRequest, logits: Tensor) -> DraftOutput:
        positions = np.fromiter((node.position for node in request.nodes), np.int64)
        sampling, rank, tau = self._ranking
        return DraftOutput(*rank_children(logits, positions, request.children, sampling, rank, tau,
                                        self._draft_vocabulary))


def joined(parts: Sequence[PassInputs]) -> PassInputs:
    """Rows of several sessions of one memory as those of one."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.visible.shape[1] for part in parts)
    masks = [np.pad(part.visible, ((0, 0), (0, width - part.visible.shape[1]))) for part in parts]
    return PassInputs(
        [token for part in parts for token in part.tokens],
        [position for part in parts for position in part.positions],
        [states for part in parts for states in part.states],
        np.concatenate(masks), np.concatenate([part.rows for part in parts]))


def _ranked_rows(requests: Sequence[tuple[TreeDrafter, DraftRequest]],
                 begun: Sequence[tuple[TreeDrafter, Rows | None]]) -> list[int]:
    """Return the pass's rows whose children are asked for; none if an output is from an earlier pass."""
    ranked_rows, start = [], 0
    for (drafter, request), (_, rows) in zip(requests, begun, strict=True):
        text = len(rows.text) if rows else 0
        following = iter(range(start + text, start + text + len(request.nodes)))
        for node in request.nodes:
            if node.id == drafter._root and not text:
                return []
            ranked_rows.append(start + text - 1 if node.id == drafter._root else next(following))
        start += len(rows) if rows else 0
    return ranked_rows
