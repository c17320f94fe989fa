"""Attention of a batch: rows of several sessions in one pass, each over its own session's cache.

The linear layers see all rows at once.  Attention runs session by session: a call over one pool of all
sessions' rows would read every cache for every row (docs/experiments.md has both times).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.messages import Segment
from flowspec_edge.stage.layers.kv_cache import KVCache


@dataclass(eq=False)
class Part:
    """A segment in a pass.

    mask   [n, len(cache) + n] bool, True where a row sees a column
    ended  the session or the run has ended during the pass: the cache must not be touched any more
    """

    segment: Segment
    cache: KVCache
    mask: NDArray[np.bool_]
    ended: bool = False

    def __len__(self) -> int:
        return len(self.segment.numbers)


class BatchMask:
    """Additive masks of the parts' rows, in order (``attention.folded_mask``)."""

    def __init__(self, masks: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """``lengths``: rows of each part, at least one."""
        self.rows = sum(lengths)
        self._masks = masks
        self._lengths = lengths

    def attend(self, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], query: Tensor,
               keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> Tensor:
        """query [1, heads, n + padding, d] to [1, n + padding, heads, d].

        ``attend`` computes a part's rows from query, key, value and mask.  Rows of ended parts, whose key is
        None, and padding become 0.
        """
        heads, total, width = query.shape[1:]
        out = query.new_zeros(1, total, heads, width)
        start = 0
        for mask, n, key, value in zip(self._masks, self._lengths, keys, values, strict=True):
            if key is not None and value is not None:
                out[:, start : start + n] = attend(query[:, :, start : start + n], key, value, mask)
            start += n
        return out


class BatchCache:
    """The parts' caches; transformers' ``past_key_values`` in a pass with a :class:`BatchMask`."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object
               ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """As ``KVCache.update``, by part; None for parts that have ended."""
        return _by_part(part.cache.update(keys[:, :, rows], values[:, :, rows], layer_idx)
                        if not part.ended else (None, None) for part, rows in self._slices())

    def write(self, rows: Tensor, layer_idx: int
              ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """As ``KVCache.write``, by part; None for parts that have ended."""
        return _by_part(part.cache.write(rows[own], layer_idx) if not part.ended else (None, None)
                        for part, own in self._slices())

    def _slices(self) -> Iterator[tuple[Part, slice]]:
        start = 0
        for part in self._parts:
            yield part, slice(start, start + len(part))
            start += len(part)


def _by_part(pairs: Iterator[tuple[Tensor | None, Tensor | None]]
             ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    keys, values = zip(*pairs, strict=True)
    return keys, values
