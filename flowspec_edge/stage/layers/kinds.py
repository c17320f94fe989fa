"""The kinds of a model's layers: how each remembers the rows of a text; the interface: ``stage_cache``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.manifest import CacheBits, reserved
from flowspec_edge.stage.layers.attention import BatchCache, BatchMask, Mask, PathMask, SharedMask
from flowspec_edge.stage.layers.kv_cache import KVArena, row_bytes, window_reusable, window_rows
from flowspec_edge.stage.layers.recurrent import GatedDelta
from flowspec_edge.stage.layers.stage_cache import CacheKind, LayerCache, Part


@dataclass(frozen=True)
class KeysValues:
    """Keys and values.

    groups  query heads per key/value head
    window  rows that a row sees, its own included; None: all
    """

    kv_heads: int
    groups: int
    head_dim: int
    cache_bits: CacheBits = "16bit"
    window: int | None = None

    def rows(self, capacity: int, tentative: int) -> int:
        """Return how many rows a session of ``capacity`` rows holds at most, ``tentative`` of them uncommitted."""
        return capacity if self.window is None else min(capacity, window_rows(self.window, tentative))

    @property
    def takes_memory_each(self) -> bool:
        return self.window is not None

    def reserved(self, rows: int, requests: int, tentative: int) -> int:
        return reserved(self.window, rows, requests, tentative)

    def reusable(self, text: int, limit: int, snapshot: int) -> int:
        return limit if self.window is None else window_reusable(self.window, text, limit, snapshot)

    def arena(self, layers: Sequence[int], dtype: torch.dtype, device: torch.device, rows: int) -> KVArena:
        return KVArena(layers, self.kv_heads, self.head_dim, dtype, device, self.cache_bits, rows, self.window)

    def row_bytes(self, width: int) -> int:
        """Return the bytes of one row in one layer; ``width``: bytes of a value in the compute dtype."""
        return row_bytes(self.kv_heads, self.head_dim, width, self.cache_bits)

    def inputs(self, parts: Sequence[Part], index: int, dtype: torch.dtype, device: torch.device, step: int
               ) -> tuple[Any, Mask]:
        """Return the caches, and what the rows see of them."""
        masks = [self._mask(part, part.cache.parts[index], dtype, device, step) for part in parts]
        caches: list[Any] = [part.cache.parts[index] for part in parts]
        if len(parts) == 1:
            return caches[0], masks[0]
        counts = [len(part) for part in parts]
        return BatchCache(caches, counts, lambda number: parts[number].ended), BatchMask(masks, counts)

    def _mask(self, part: Part, cache: LayerCache, dtype: torch.dtype, device: torch.device, step: int) -> Mask:
        if dtype == torch.float32:
            return self.shared_mask(cache.visible(part.mask, part.segment.positions, part.columns), dtype, device)
        return PathMask(part.mask, cache.first, self.window, dtype, device, step)

    def shared_mask(self, visible: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> SharedMask:
        """Make a mask from ``visible`` [n, m]: which of the columns each row of a pass sees."""
        return SharedMask(visible, self.groups, dtype, device)


def layer_kinds(config: DecoderConfig, cache_bits: CacheBits = "16bit") -> list[KeysValues | GatedDelta]:
    """Return the kind of every layer of a model."""
    heads = config.num_key_value_heads
    return [GatedDelta.from_config(config) if layer_type == "linear_attention" else
            KeysValues(heads, config.num_attention_heads // heads, config.head_dim, cache_bits,
                       config.sliding_window if layer_type == "sliding_attention" else None)
            for layer_type in config.layer_types]


def by_kind(kinds: Iterable[CacheKind], first: int = 0) -> dict[CacheKind, list[int]]:
    """Return the layers of each kind, counted from ``first``, in the order of their first layers."""
    layers_of: dict[CacheKind, list[int]] = {}
    for layer, kind in enumerate(kinds, first):
        layers_of.setdefault(kind, []).append(layer)
    return layers_of
