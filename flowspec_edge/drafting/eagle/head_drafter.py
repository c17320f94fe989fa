"""The common part of drafting with EAGLE-1/2 and EAGLE-3 heads.

Draft passes of several requests are one: their rows go through a head's linear layers and lm_head together.
A pass takes about the time of reading the head's weights, so one for four requests takes hardly longer than
one for one. Attention runs request by request, each over its own cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.fused import DraftLayer, RotaryTable, is_fixed
from flowspec_edge.drafting.recorded import PassInputs, PassModel, RecordedPasses
from flowspec_edge.drafting.tree_cache import CacheMemory, CacheShape, PassCache
from flowspec_edge.drafting.tree_drafter import Rows, TreeDrafter
from flowspec_edge.errors import ProtocolError
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.util.tensors import indices
from flowspec_edge.util.weight_file import EmbeddingTable, tokens_device

ATTENTION = "flowspec_draft"  # transformers' "sdpa", also for batches


class _Batch:
    """Masks and caches of all requests, in place of a request's own."""

    def __init__(self, parts: Sequence[tuple[int, PassCache, Tensor]]) -> None:
        """``parts``: of each request, its rows in the pass, its cache and its mask [1, 1, n, m]."""
        self._parts = parts

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
               ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        pairs = [cache.update(keys[:, :, at], values[:, :, at], layer) for at, cache, _ in self.parts()]
        return tuple(key for key, _ in pairs), tuple(value for _, value in pairs)

    def parts(self) -> Iterator[tuple[slice, PassCache, Tensor]]:
        start = 0
        for rows, cache, mask in self._parts:
            yield slice(start, start + rows), cache, mask
            start += rows


def _attend(module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
            ) -> tuple[Tensor, None]:
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(attention_mask, _Batch):
        attended: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **options)
        return attended
    parts = [attend(module, query[:, :, at], own_key, own_value, mask, **options)[0]
             for (at, _, mask), own_key, own_value in zip(attention_mask.parts(), key, value, strict=True)]
    return torch.cat(parts, dim=1), None


AttentionInterface.register(ATTENTION, _attend)


class KeyValueCache(Protocol):
    """The one cache method that transformers' attention classes call."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values; return those of the mask's columns."""


class FusibleHead(nn.Module, ABC):
    """``fused``: what computes the layer after :meth:`fuse_layer`."""

    config: LlamaConfig
    rotary_emb: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.fused: DraftLayer | None = None

    def fuse_layer(self) -> None:
        """Compute in few kernel launches from now on; the layer's weights are not where they were.

        Before the first pass, on the device and in the dtype of all passes; each is one over a
        ``PassCache``, for positions that have been reached (:meth:`reach`).
        """
        if self.fused is None and is_fixed(self.rotary_emb) and (layer := self._fused_layer()):
            weight = next(self.parameters())  # is never quantised
            self.fused = layer
            self.rotary_emb = RotaryTable(self.rotary_emb, weight.dtype, weight.device)

    def reach(self, position: int) -> None:
        if isinstance(self.rotary_emb, RotaryTable):
            self.rotary_emb.reach(position)

    def embedded(self, tokens: Tensor) -> Tensor:
        """``tokens`` [B, n], int64, or their embeddings [B, n, H], as embeddings."""
        return tokens if tokens.is_floating_point() else cast(nn.Module, self.embed_tokens)(tokens)

    def cache_shape(self) -> CacheShape:
        config: LlamaConfig = self.config
        norm = next(self.parameters())  # is never quantised
        return CacheShape(
            layers=1,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            dtype=norm.dtype, device=norm.device, window=config.max_position_embeddings,
        )

    @abstractmethod
    def _fused_layer(self) -> DraftLayer | None:
        """None: it stays transformers' own."""


class HeadDrafter(TreeDrafter):
    """Rows pair a state with a token; ``head`` has the interface of :class:`EagleHead`."""

    rows_behind = 1

    def __init__(self, head: FusibleHead, logits: Callable[[Tensor], Tensor],
                 draft_vocabulary: DraftVocabulary | None = None, memory: CacheMemory | None = None,
                 recorded: RecordedPasses | None = None) -> None:
        self._head: FusibleHead = head.eval().requires_grad_(False)
        self._states: list[Tensor] = []  # of queued text rows, [n, width] each, in their order
        shape = head.cache_shape()
        self._dtype, self._device = shape.dtype, shape.device
        self._tokens_device = tokens_device(cast(nn.Module, head.embed_tokens), self._device)
        super().__init__(shape, logits, draft_vocabulary, memory, recorded)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        super().reset(sampling, rank, tau)
        self._states.clear()

    def _forget_rows(self, queued: int) -> None:
        super()._forget_rows(queued)
        self._states = [torch.cat(self._states)[:queued].clone()] if queued else []

    def _text_states(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        """States [n, width] of the text rows that ``features`` and ``rows`` name; by default the features."""
        return features.to(self._device, self._dtype)

    def _to_head_input(self, states: Tensor) -> Tensor:
        """States [n, width] of text rows to the head's inputs [n, H]."""
        return states

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        if features is None:
            if self._text_length or len(tokens) != 1:
                raise ProtocolError("only the first token of a text comes without its feature")
            self._text_length = 1
            return
        if len(features) != len(tokens) or not self._text_length:
            raise ProtocolError(
                f"{len(tokens)} committed tokens need as many features after the text's first "
                f"token, not {len(features)} after {self._text_length}"
            )
        if not tokens:
            return
        self._states.append(self._text_states(features, rows))
        self._queue.extend(tokens)
        self._text_length += len(tokens)

    def _inputs(self, rows: Rows) -> PassInputs:
        text, nodes, placed = rows.text, rows.nodes, rows.placed
        states: list[Tensor] = []
        if text:
            waiting = torch.cat(self._states)
            states.append(self._to_head_input(waiting[: len(text)]))
            self._states = [waiting[len(text) :]] if len(text) < len(waiting) else []
        states += [self._outputs[node.parent][None] for node in nodes]
        start = self._cache.committed - len(text)
        # Text rows stand at 0, 1, ...: row i holds token i + 1.  So a node's row is one below it.
        tokens = [*text, *(node.token for node in nodes)]
        positions = [*range(start, start + len(text)), *(node.position - 1 for node in nodes)]
        self._head.reach(max(positions))
        return PassInputs(tokens, positions, states, *placed)

    def shares_passes_with(self, other: Drafter) -> bool:
        return isinstance(other, HeadDrafter) and other._head is self._head

    def _compute(self, parts: Sequence[tuple[TreeDrafter, Rows, PassInputs]]) -> list[Tensor]:
        states = [state for *_, own in parts for state in own.states]
        tokens = indices([token for *_, own in parts for token in own.tokens], self._tokens_device)
        positions = indices([position for *_, own in parts for position in own.positions], self._device)
        held = [(len(rows), drafter._cache.for_pass(rows.placed), drafter._cache.mask(rows.placed))
                for drafter, rows, _ in parts]
        cache: Any = _Batch(held)
        mask: Any = cache
        if len(held) == 1:
            [(_, cache, mask)] = held
        out = _one_pass(self._head, states[0] if len(states) == 1 else torch.cat(states), tokens, positions,
                        mask, cache)
        return list(out.split([rows for rows, *_ in held]))

    def pass_model(self) -> PassModel:
        head, embeddings = self._head, cast(nn.Module, self._head.embed_tokens)
        return PassModel(
            partial(_one_pass, head), self._logits, head.config.hidden_size, True, head.reach,
            embeddings if isinstance(embeddings, EmbeddingTable) else None,
            "" if head.fused is not None else "its layer is transformers' own")


def _one_pass(head: nn.Module, states: Tensor | None, tokens: Tensor, positions: Tensor, mask: Any,
              cache: Any) -> Tensor:
    assert states is not None
    out: Tensor = head(states[None], tokens[None], positions[None], mask, cache)
    return out[0]
