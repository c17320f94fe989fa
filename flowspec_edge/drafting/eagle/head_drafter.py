"""The common part of drafting with EAGLE-1/2 and EAGLE-3 heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.eagle import batch
from flowspec_edge.drafting.tree_cache import CacheShape
from flowspec_edge.drafting.tree_drafter import Rows, TreeDrafter
from flowspec_edge.errors import ProtocolError
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.tree.draft_api import DraftNode
from flowspec_edge.util.embedding_table import tokens_device
from flowspec_edge.util.tensors import indices


class KeyValueCache(Protocol):
    """The one cache method that transformers' attention classes call."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values; return those of the mask's columns."""


class HeadDrafter(TreeDrafter):
    """Rows pair a state with a token; ``head`` has the interface of :class:`EagleHead`."""

    rows_behind = 1

    def __init__(self, head: nn.Module, logits: Callable[[Tensor], Tensor],
                 draft_vocabulary: DraftVocabulary | None = None) -> None:
        self._head = head.eval().requires_grad_(False)
        self._states: list[Tensor] = []  # of queued text rows, [n, width] each, in their order
        config: LlamaConfig = head.config
        norm = next(head.parameters())  # is never quantised
        self._dtype, self._device = norm.dtype, norm.device
        self._tokens_device = tokens_device(cast(nn.Module, head.embed_tokens), self._device)
        shape = CacheShape(
            layers=1,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            dtype=self._dtype, device=self._device, window=config.max_position_embeddings,
        )
        super().__init__(shape, logits, draft_vocabulary)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        super().reset(sampling, rank, tau)
        self._states.clear()

    def _forget_rows(self, queued: int) -> None:
        super()._forget_rows(queued)
        self._states = [torch.cat(self._states)[:queued].clone()] if queued else []

    @abstractmethod
    def _text_states(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        """States [n, width] of the text rows that ``features`` and ``rows`` name."""

    @abstractmethod
    def _to_head_input(self, states: Tensor) -> Tensor:
        """States [n, width] of text rows to the head's inputs [n, H]."""

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

    def _rows(self, text: list[int], nodes: list[DraftNode], mask: Tensor) -> Tensor:
        return batch.run(self._head, [self._head_rows(text, nodes, mask)])[0]

    def _head_rows(self, text: list[int], nodes: list[DraftNode], mask: Tensor) -> batch.HeadRows:
        entering = [self._to_head_input(torch.cat(self._states))] if text else []
        entering += [torch.stack([self._outputs[node.parent] for node in nodes])] if nodes else []
        self._states.clear()
        start = self._cache.committed - len(text)
        # Text rows stand at 0, 1, ...: row i holds token i + 1.  So a node's row is one below it.
        tokens = indices([*text, *(node.token for node in nodes)], self._tokens_device)
        positions = indices([*range(start, start + len(text)), *(node.position - 1 for node in nodes)],
                            self._device)
        return batch.HeadRows(torch.cat(entering), tokens, positions, mask, self._cache)

    def shares_passes_with(self, other: Drafter) -> bool:
        return isinstance(other, HeadDrafter) and other._head is self._head

    def _rows_together(self, begun: Sequence[tuple[TreeDrafter, Rows]]) -> list[Tensor]:
        return batch.run(self._head, [drafter._head_rows(*rows) for drafter, rows in begun
                                      if isinstance(drafter, HeadDrafter)])
