"""The key/value cache of one stage: preallocated, one slot per row, ordered by number."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Int32
from flowspec_edge.model.manifest import CacheBits
from flowspec_edge.util.tensors import to_device
from flowspec_edge.util.torchdevice import release


class KVCache:
    """Keys and values of up to ``capacity`` rows for layers [lo, hi); transformers' ``past_key_values``.

    A pass writes its rows behind the last slot with ``update``; ``append`` makes them part of the cache,
    otherwise the next pass overwrites them.
    """

    def __init__(self, layers: tuple[int, int], kv_heads: int, head_dim: int, capacity: int,
                 dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self._first_layer = layers[0]
        # By layer, [key or value, slot, kv head, head_dim]: the heads of a row are contiguous, as the layers
        # produce them, so that writing, reading and moving rows touches memory in order.
        self._store = [self._empty(capacity, kv_heads, head_dim, dtype, device) for _ in range(*layers)]
        self._views = [_views(layer) for layer in self._store]
        self._device = device
        self._numbers = np.empty(capacity, dtype=np.int32)
        self._length = 0

    def _empty(self, capacity: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
               ) -> Tensor:
        return torch.empty(2, capacity, kv_heads, head_dim, dtype=dtype, device=device)

    def __len__(self) -> int:
        return self._length

    @property
    def numbers(self) -> Int32:
        """[len] int32, increasing: the number in each slot (a view, valid until the next change)."""
        return self._numbers[: self._length]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._store)

    def rows(self) -> list[Tensor]:
        """Keys and values by layer: views [2, len, kv_heads, head_dim]."""
        return [layer[:, : self._length] for layer in self._store]

    def slots(self, numbers: Int32) -> NDArray[np.int64] | None:
        """The slots [n] of ``numbers`` [n], increasing; None if one is missing."""
        held = self.numbers
        at = held.searchsorted(numbers)
        if len(at) and (at.max() >= len(held) or (held[at] != numbers).any() or (at[1:] <= at[:-1]).any()):
            return None
        return at

    def reserve(self, rows: int) -> None:
        """FlowspecError unless ``rows`` more fit."""
        if self._length + rows > self.capacity:
            raise FlowspecError(f"KV cache is full: {self._length} rows held, {rows} more to come, "
                                f"capacity {self.capacity}: shorten the request or raise the capacity")

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows [1, kv_heads, n, head_dim] behind the last slot.

        Returns all keys and values of the layer, new rows included: [1, kv_heads, len + n, head_dim].
        """
        held, n = self._length, keys.shape[2]
        key_slots, value_slots = self._views[layer_idx - self._first_layer]
        key_slots.narrow(2, held, n).copy_(keys)
        value_slots.narrow(2, held, n).copy_(values)
        return key_slots.narrow(2, 0, held + n), value_slots.narrow(2, 0, held + n)

    def write(self, rows: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """``update`` for keys and values in one tensor [n, 2, kv_heads, head_dim], with one copy."""
        held, n = self._length, len(rows)
        self._store[layer_idx - self._first_layer][:, held : held + n].copy_(rows.transpose(0, 1))
        key_slots, value_slots = self._views[layer_idx - self._first_layer]
        return key_slots.narrow(2, 0, held + n), value_slots.narrow(2, 0, held + n)

    def append(self, numbers: Int32) -> None:
        """Add the rows that every layer has just written; their numbers must exceed all cached ones."""
        end = self._length + len(numbers)
        self._numbers[self._length : end] = numbers
        self._length = end

    @torch.inference_mode()
    def keep(self, mask: NDArray[np.bool_]) -> int:
        """Drop the slots where ``mask`` [len] is False, compact the rest, and return the number dropped."""
        if mask.all():
            return 0
        first = int(mask.argmin())
        source = first + np.flatnonzero(mask[first:])
        length = first + len(source)
        if len(source):
            self._numbers[first:length] = self._numbers[source]
            slots = to_device(torch.from_numpy(source), self._device)
            for layer in self._store:
                layer[:, first:length] = layer.index_select(1, slots)
        dropped, self._length = self._length - length, length
        return dropped

    @torch.inference_mode()
    def move(self, capacity: int, slots: NDArray[np.int64]) -> None:
        """Keep only ``slots`` [n], increasing, renumbered from 0, in memory for ``capacity`` rows.

        Reallocates one layer at a time, so that at most one layer is in memory twice.
        """
        at = to_device(torch.from_numpy(slots), self._device)
        for i in range(len(self._store)):
            new = self._store[i].new_empty(2, capacity, *self._store[i].shape[2:])
            new[:, : len(slots)] = self._store[i].index_select(1, at)
            self._store[i], self._views[i] = new, _views(new)
            release(self._device)
        self.capacity, self._length = capacity, len(slots)
        self._numbers = np.arange(capacity, dtype=np.int32)

    def clear(self) -> None:
        self._length = 0


class Int8KVCache(KVCache):
    """Keeps a byte a value, and a scale for each head of a row, in ``_SCALE`` bytes behind its values.

    A pass reads all rows of a layer in the layers' dtype, its own rows as they are kept: what a row sees does
    not depend on when it is computed.
    """

    def _empty(self, capacity: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
               ) -> Tensor:
        self._dtype = dtype
        return torch.empty(2, capacity, kv_heads, head_dim + _SCALE, dtype=torch.int8, device=device)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object) -> tuple[Tensor, Tensor]:
        rows = torch.stack((keys[0], values[0])).permute(2, 0, 1, 3)
        return self.write(rows, layer_idx)

    def write(self, rows: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        held, n = self._length, len(rows)
        layer = self._store[layer_idx - self._first_layer]
        layer[:, held : held + n].copy_(in_int8(rows).transpose(0, 1))
        return _views(from_int8(layer[:, : held + n], self._dtype))


_SCALE = 2  # bytes of a bfloat16


def in_int8(values: Tensor) -> Tensor:
    """[..., d] to int8 [..., d + _SCALE]: codes of at most 127, then their bfloat16 scale."""
    wide = values.float()
    # Rounded up to bfloat16: a smaller scale would clip the largest value.
    scales = (wide.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-8)).to(torch.bfloat16)
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    codes = (wide * inverse).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def from_int8(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that ``in_int8`` kept: [..., d] in ``dtype``."""
    scales = stored[..., -_SCALE:].contiguous().view(torch.bfloat16)
    return stored[..., :-_SCALE].to(dtype) * scales.to(dtype)


def row_bytes(kv_heads: int, head_dim: int, width: int, kept_in: CacheBits) -> int:
    """Of one row's keys and values in one layer; ``width``: bytes of a value in the compute dtype."""
    return 2 * kv_heads * (head_dim + _SCALE if kept_in == "int8" else head_dim * width)


def _views(layer: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer as attention takes them: [1, kv_heads, capacity, head_dim] each."""
    return layer[0].transpose(0, 1)[None], layer[1].transpose(0, 1)[None]
