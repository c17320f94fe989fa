"""Drafting with a block: one pass when the text has grown, then children of any node at its depths.

The tree outlives a root: nodes that are in flight when the text grows go on below the new root, and their
children are ranked by its block, at their new depths, after the tokens that really stand before them.  A node
deeper than the block has no children yet; it may be asked for again below a later root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowspec_edge.drafting.base import Drafter, root_misplaced_error
from flowspec_edge.drafting.block.head import BlockHead
from flowspec_edge.drafting.recorded import WARM_ROWS
from flowspec_edge.drafting.tapped import TappedStates
from flowspec_edge.drafting.tree_cache import FIRST_CAPACITY
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Tap
from flowspec_edge.model.output_head import OutputHead
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.sampling.sampler import largest, rank_children
from flowspec_edge.stage.layers.attention import SharedMask
from flowspec_edge.tree.draft_api import ABSENT, DraftNode, DraftOutput, DraftRequest
from flowspec_edge.util.tensors import indices
from flowspec_edge.util.weight_file import tokens_device


class BlockDrafter(Drafter):
    """A session's drafter with a block head.

    ``lm_head`` is the target's, of the head's dtype and on its device, for heads without their own.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, head: BlockHead, lm_head: OutputHead) -> None:
        self._head: BlockHead = head.eval().requires_grad_(False)
        head.prepare()
        self._lm_head: nn.Module = lm_head if head.lm_head is None else head.lm_head
        shape, config = head.cache_shape(), head.config
        self._shape, self._device = shape, shape.device
        self._tokens_device = tokens_device(head.embed_tokens, self._device)
        self._arena = shape.arena(FIRST_CAPACITY)
        self._cache = self._arena.take(FIRST_CAPACITY)  # of the text's rows but the last; a block's are not kept
        self._tapped = TappedStates(config.captured, shape.dtype, self._device)
        self.taps = self._tapped.taps
        self._vocabulary = None
        if config.draft_vocab_size != config.vocab_size:
            self._vocabulary = DraftVocabulary(head.target_ids().cpu().numpy(), config.vocab_size)
        self.reset(Sampling(), "draft", 1.0)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._text: list[int] = []
        self._states: list[Tensor] = []
        self._restart(0, sampling, rank, tau)

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        if not 0 < tokens <= len(self._text):
            return False
        del self._text[tokens:]
        former_states, rows = self._states, tokens - 1
        self._restart(min(rows, len(self._cache)), sampling, rank, tau)
        if rows > len(self._cache):
            self._states = [torch.cat(former_states)[: rows - len(self._cache)].clone()]
        return True

    def _restart(self, rows: int, sampling: Sampling, rank: Rank, tau: float) -> None:
        """Begin anew with the first ``rows`` rows of the text."""
        self._ranking = (sampling, rank, tau)
        self._tapped.clear()  # the numbers are another session's
        self._cache.truncate(rows)
        self._states = []  # of the rows that follow, [n, S] each
        # Outputs [depths, H], logits [depths, D] and, for a selector, candidates [depths, k].
        self._block: tuple[Tensor, ...] | None = None

    def tap(self, message: Tap) -> None:
        self._tapped.tap(message)

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        if features is None:
            if self._text or len(tokens) != 1:
                raise ProtocolError("only the first token of a text comes without its feature")
        elif not self._text or len(rows) != len(tokens):
            raise ProtocolError(f"{len(tokens)} committed tokens need as many row numbers after the text's "
                                f"first token, not {len(rows)} after {len(self._text)}")
        elif tokens:
            self._states.append(self._tapped.take(rows))
            if sum(map(len, self._states)) >= WARM_ROWS:  # of a prompt: states are many times as large
                self._read()
        self._text += tokens
        self._block = None

    def scores_only(self, request: DraftRequest) -> bool:
        return self._block is not None

    @torch.inference_mode()
    def expand(self, request: DraftRequest) -> DraftOutput:
        self._read()
        below = [node.position - len(self._text) + 1 for node in request.nodes]
        self._check(request, below)
        beyond = np.array(below, np.int64) >= self._head.depths
        output = replace(DraftOutput.empty(len(request.nodes), request.children), beyond=beyond)
        inside = np.flatnonzero(~beyond).tolist()
        if not inside:
            return output
        if self._block is None:
            self._block = self._draft()
        at = indices([below[row] for row in inside], self._device)
        before = indices([request.nodes[row].token for row in inside], self._device)
        logits = self._head.after(before, *(part.index_select(0, at) for part in self._block))
        positions = np.fromiter((request.nodes[row].position for row in inside), np.int64)
        sampling, rank, tau = self._ranking
        tokens, scores = rank_children(logits, positions, request.children, sampling, rank, tau,
                                       self._vocabulary)
        output.tokens[inside, : tokens.shape[1]] = np.where(np.isfinite(scores), tokens, ABSENT)
        output.scores[inside, : scores.shape[1]] = scores
        return output

    def _check(self, request: DraftRequest, below: Sequence[int]) -> None:
        node: DraftNode
        for node, depth in zip(request.nodes, below, strict=True):
            if not self._text or (node.id == request.root) != (depth == 0) or depth < 0:
                raise root_misplaced_error(node, len(self._text))

    @torch.inference_mode()
    def _read(self) -> None:
        """Keys and values of the text rows that are queued."""
        if not self._states:
            return
        for states in torch.cat(self._states).split(WARM_ROWS):
            rows = self._reserve(len(states))
            for layer, keys_values in enumerate(self._head.keys_values(states, indices([*rows], self._device))):
                self._cache.write(keys_values, layer)
            self._cache.append(len(states))
        self._states.clear()

    def _reserve(self, rows: int) -> range:
        """Make room for a pass of ``rows`` rows; the positions of these."""
        slots = range(len(self._cache), len(self._cache) + rows)
        self._arena.reach(self._cache, slots.stop)
        self._cache.reserve(rows)
        return slots

    def _draft(self) -> tuple[Tensor, ...]:
        head = self._head
        slots = self._reserve(head.config.block_size)
        tokens = indices(head.slot_tokens(self._text[-1]), self._tokens_device)
        out = head(head.embed_tokens(tokens), indices([*slots], self._device), self._masks(slots), self._cache)
        hidden = out[len(slots) - head.depths :]
        logits = self._lm_head(hidden)
        most = head.config.selector_top_k
        return (hidden, logits, largest(logits, most)[1]) if most else (hidden, logits)

    def _masks(self, slots: range) -> list[SharedMask]:
        """Make the masks of all layers, over the text's columns, then the slots'."""
        config = self._head.config
        masks: dict[tuple[bool, int | None], SharedMask] = {}
        for kind in zip(config.causal, config.windows, strict=True):
            if kind not in masks:
                visible = visible_slots(slots, *kind, config.window_from_root)
                masks[kind] = self._shape.mask(visible)
        return [masks[kind] for kind in zip(config.causal, config.windows, strict=True)]


def visible_slots(slots: range, causal: bool, window: int | None, from_root: bool) -> NDArray[np.bool_]:
    """Return which columns each slot sees: bool [slots, columns]; a column's number is its position."""
    positions, columns = np.array(slots)[:, None], np.arange(slots.stop)[None]
    visible = columns <= positions if causal else np.ones((len(slots), slots.stop), bool)
    if window is not None:
        last = slots.start - window if from_root else positions + 1 - window
        visible &= (columns >= last) | (columns >= slots.start)
    return visible
