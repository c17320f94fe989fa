"""The key/value cache of one stage: preallocated, one slot a row, ordered by number.

Knows slots and numbers.  Does not know which numbers are committed, wanted or dead.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Int32
from flowspec_edge.stage.memory import release
from flowspec_edge.stage.staging import to_device


class KVCache:
    """Keys and values of up to ``capacity`` rows for layers [lo, hi).

    A forward pass writes its rows behind the last slot with :meth:`update`, layer by layer; they
    become part of the cache with :meth:`append`, or are simply overwritten if the pass is given
    up.  transformers' layers take this object as ``past_key_values``.
    """

    def __init__(self, layers: tuple[int, int], kv_heads: int, head_dim: int, capacity: int,
                 dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self._first_layer = layers[0]
        # By layer, [key or value, slot, kv head, head_dim]: a row's heads side by side, as the layers
        # produce them, so that writing, reading and moving rows touches memory in order.
        self._store = [torch.empty(2, capacity, kv_heads, head_dim, dtype=dtype, device=device)
                       for _ in range(*layers)]
        self._views = [_views(layer) for layer in self._store]
        self._device = device
        self._numbers = np.empty(capacity, dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def numbers(self) -> Int32:
        """[len] int32, increasing: the number in each slot (a view, valid until the next change)."""
        return self._numbers[: self._length]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(layer.nbytes for layer in self._store)

    def rows(self) -> list[Tensor]:
        """Keys and values held, by layer: [2, len, kv_heads, head_dim] each, views."""
        return [layer[:, : self._length] for layer in self._store]

    def slots(self, numbers: Int32) -> NDArray[np.int64] | None:
        """[n] where ``numbers`` [n], increasing, lie; None if one is not held."""
        held = self.numbers
        at = held.searchsorted(numbers)
        if len(at) and (at.max() >= len(held) or (held[at] != numbers).any() or (at[1:] <= at[:-1]).any()):
            return None
        return at

    def reserve(self, rows: int) -> None:
        """Check that ``rows`` more fit; FlowspecError otherwise."""
        if self._length + rows > self.capacity:
            raise FlowspecError(f"KV cache is full: {self._length} rows held, {rows} more to come, "
                                f"capacity {self.capacity}: shorten the request or raise the capacity")

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object) -> tuple[Tensor, Tensor]:
        """Write new rows [1, kv_heads, n, head_dim] behind the last slot of one layer.

        Returns all keys and all values of the layer, new rows included: [1, kv_heads, len + n,
        head_dim].  Layers call this; the name and the arguments are transformers'.
        """
        held, n = self._length, keys.shape[2]
        key_slots, value_slots = self._views[layer_idx - self._first_layer]
        key_slots.narrow(2, held, n).copy_(keys)
        value_slots.narrow(2, held, n).copy_(values)
        return key_slots.narrow(2, 0, held + n), value_slots.narrow(2, 0, held + n)

    def write(self, rows: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """:meth:`update` for keys and values that lie together, [n, 2, kv_heads, head_dim], in one copy."""
        held, n = self._length, len(rows)
        self._store[layer_idx - self._first_layer][:, held : held + n].copy_(rows.transpose(0, 1))
        key_slots, value_slots = self._views[layer_idx - self._first_layer]
        return key_slots.narrow(2, 0, held + n), value_slots.narrow(2, 0, held + n)

    def append(self, numbers: Int32) -> None:
        """Take in the rows that every layer has just written; larger numbers than all held."""
        end = self._length + len(numbers)
        self._numbers[self._length : end] = numbers
        self._length = end

    @torch.inference_mode()
    def keep(self, mask: NDArray[np.bool_]) -> int:
        """Drop the slots where ``mask`` [len] is False, closing the holes; returns how many.

        Only rows behind the first hole move.
        """
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
        """Hold only ``slots`` [n], increasing, as numbers 0, 1, …, in memory for ``capacity`` rows.

        Layer by layer: beside the old memory or the new there is never more than one layer.
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
        """Forget all rows; the memory stays."""
        self._length = 0


def _views(layer: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer as attention takes them: [1, kv_heads, capacity, head_dim] each."""
    return layer[0].transpose(0, 1)[None], layer[1].transpose(0, 1)[None]
