"""The Gumbel noise of ``sampling.rule`` on any device: from the same words, bit for bit, in a model's dtype.

The words stay whole until they are floats, so float32 suffices for their logarithms; what it cannot order
the host decides in float64 (``sampling.sampler``).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.sampling.rule import GAMMA, keys, mixed

SESSIONS = 8  # concurrent sessions whose tables are kept
_BLOCK = 8  # positions, computed together on an accelerator: saves launches, delays no draft pass by much


def noise_rows(seed: int, positions: NDArray[np.integer], vocabulary: int, like: Tensor) -> list[Tensor]:
    """[vocabulary] for each position, of the dtype (float32 or float64) and on the device of ``like``."""
    held, count = (_rows, 1) if like.device.type == "cpu" else (_blocks, _BLOCK)
    return [held(position // count, count, seed, vocabulary, like.device, like.dtype)[position % count]
            for position in positions.tolist()]


def _noise(block: int, count: int, seed: int, vocabulary: int, device: torch.device, dtype: torch.dtype
           ) -> Tensor:
    """[count, vocabulary], for the consecutive positions of a block."""
    positions = np.arange(count) + block * count
    return gumbel_from(device_words(seed, positions, vocabulary, device), dtype)


_rows = lru_cache(maxsize=8 * SESSIONS)(_noise)
_blocks = lru_cache(maxsize=2 * SESSIONS)(_noise)  # a tree may reach into the next block


def gumbel_from(words: Tensor, dtype: torch.dtype) -> Tensor:
    """``rule.gumbel_from`` in ``dtype``; without comparisons, which on a CPU take longer than logarithms."""
    t = torch.add(torch.tensor(2.0**-65, dtype=dtype), words, alpha=2.0**-64)
    log_u = F.threshold(t, 0.0, 1.0).log_().add_(t.clamp_(max=0.0).log1p_())
    return log_u.neg_().log_().neg_()


def device_words(seed: int, positions: NDArray[np.integer], vocabulary: int, device: torch.device) -> Tensor:
    """The words of the first ``vocabulary`` tokens at ``positions`` [p]: int64 [p, vocabulary]."""
    counted = torch.arange(1, vocabulary + 1, device=device).mul_(GAMMA)
    words = torch.empty(len(positions), vocabulary, dtype=torch.int64, device=device)
    for row, key in zip(words, keys(seed, positions).tolist(), strict=True):
        torch.add(counted, key, out=row)  # an upload of all keys would wait for the device
    mixed(words)
    return words
