"""Draft passes of several requests as one: their rows go through a head's linear layers and lm_head together.

A pass takes about the time of reading the head's weights, so one for four requests takes hardly longer than
one for one.  Attention runs request by request, each over its own cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flowspec_edge.drafting.tree_cache import TreeCache

NAME = "flowspec_draft"


@dataclass(frozen=True, eq=False)
class HeadRows:
    """A request's rows of a pass.

    states     [n, H]     the head's inputs
    tokens     [n]        int64, where the head's embeddings want them
    positions  [n]        int64
    mask       [1, 1, n, m] additive, over the cache's m rows
    """

    states: Tensor
    tokens: Tensor
    positions: Tensor
    mask: Tensor
    cache: TreeCache

    def __len__(self) -> int:
        return len(self.states)


class _Batch:
    """Masks and caches of all requests, in place of a request's own."""

    def __init__(self, rows: Sequence[HeadRows]) -> None:
        self._rows = rows

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
               ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        pairs = [rows.cache.update(keys[:, :, at], values[:, :, at], layer) for rows, at in self.slices()]
        return tuple(key for key, _ in pairs), tuple(value for _, value in pairs)

    def slices(self) -> Iterator[tuple[HeadRows, slice]]:
        start = 0
        for rows in self._rows:
            yield rows, slice(start, start + len(rows))
            start += len(rows)


def register() -> None:
    """Register ``attn_implementation=NAME`` with transformers: its "sdpa", also for batches; idempotent."""
    AttentionInterface.register(NAME, _attend)


def _attend(module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
            ) -> tuple[Tensor, None]:
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(attention_mask, _Batch):
        attended: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **options)
        return attended
    parts = [attend(module, query[:, :, at], own_key, own_value, rows.mask, **options)[0]
             for (rows, at), own_key, own_value in zip(attention_mask.slices(), key, value, strict=True)]
    return torch.cat(parts, dim=1), None


def run(head: nn.Module, rows: Sequence[HeadRows]) -> list[Tensor]:
    """One pass of ``head``; outputs [n, H] of each request's rows."""
    if len(rows) == 1:
        [own] = rows
        return [head(own.states[None], own.tokens[None], own.positions[None], own.mask, own.cache)[0]]
    batch = _Batch(rows)
    states, tokens, positions = (torch.cat([getattr(own, name) for own in rows])[None]
                                 for name in ("states", "tokens", "positions"))
    out = head(states, tokens, positions, batch, batch)[0]
    return list(out.split([len(own) for own in rows]))
