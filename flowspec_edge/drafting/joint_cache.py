"""Several sessions' caches side by side, as one for a pass over rows of all of them.

Any of transformers' models takes it: a mask keeps each row to its own session's columns.  Attention does more
work than it has to, which is little beside the weights of all layers, read once instead of once a session.
EAGLE heads, whose attention is known, go session by session (``eagle.batch``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowspec_edge.drafting.tree_cache import TreeCache


class JointCache:
    """Has the methods that transformers calls; see ``TreeCache``."""

    def __init__(self, caches: Sequence[TreeCache], rows: Sequence[int]) -> None:
        """``rows``: of each session in the pass, for which its cache has made room (``TreeCache.begin``)."""
        self._caches, self._rows = caches, list(rows)

    def mask(self, masks: Sequence[Tensor]) -> Tensor:
        """Additive, [1, 1, n, m], of the sessions' masks: a row sees nothing of the other sessions."""
        width = sum(mask.shape[-1] for mask in masks)
        # Fused attention kernels want rows that begin at multiples of 16 bytes.
        whole = masks[0].new_full((1, 1, sum(self._rows), -(-width // 8) * 8), float("-inf"))
        row = column = 0
        for mask in masks:
            below, right = row + mask.shape[-2], column + mask.shape[-1]
            whole[:, :, row:below, column:right] = mask
            row, column = below, right
        return whole[..., :width]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
               ) -> tuple[Tensor, Tensor]:
        pairs = [cache.update(key, value, layer) for cache, key, value in
                 zip(self._caches, keys.split(self._rows, 2), values.split(self._rows, 2), strict=True)]
        return torch.cat([key for key, _ in pairs], 2), torch.cat([value for _, value in pairs], 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return sum(cache.get_seq_length(layer) for cache in self._caches)
