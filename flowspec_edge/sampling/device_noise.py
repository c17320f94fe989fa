"""The Gumbel noise of ``sampling.rule`` on any device, from the same Philox words, bit for bit."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.sampling.rule import TAG, gumbel_from, philox_words

SESSIONS = 8  # concurrent sessions whose tables an accelerator keeps
_BLOCK_POSITIONS = 16  # computed together on an accelerator, to save launches
_WIDE = 1 << 32


def noise_rows(seed: int, positions: NDArray[np.integer], vocabulary: int, like: Tensor) -> list[Tensor]:
    """[vocabulary] for each position, of the dtype and on the device of ``like``."""
    key = seed, vocabulary, like.device, like.dtype
    row = _noise_row if like.device.type == "cpu" else _noise_of_block
    return [row(int(position), *key) for position in positions]


def gumbel_at(seed: int, positions: NDArray[np.integer], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Noise of single tokens [m] at ``positions`` [m]: float64 [m]."""
    at = torch.from_numpy(positions.astype(np.int64))
    words = _words_of(seed, at, torch.from_numpy(tokens // 4)).numpy()
    return gumbel_from(words[np.arange(len(tokens)), tokens % 4].view(np.uint64))


@lru_cache(maxsize=64)
def _noise_row(position: int, seed: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _gumbel(torch.from_numpy(philox_words(seed, position, vocabulary).view(np.int64)), dtype)


def _noise_of_block(position: int, seed: int, vocabulary: int, device: torch.device, dtype: torch.dtype
                    ) -> Tensor:
    block, place = divmod(position, _BLOCK_POSITIONS)
    return _noise_block(block, seed, vocabulary, device, dtype)[place]


@lru_cache(maxsize=2 * SESSIONS)  # a tree may reach into the next block
def _noise_block(block: int, seed: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[_BLOCK_POSITIONS, vocabulary], for consecutive positions."""
    first = block * _BLOCK_POSITIONS
    positions = torch.arange(first, first + _BLOCK_POSITIONS, device=device)
    return _gumbel(device_words(seed, positions, vocabulary), dtype)


def device_words(seed: int, positions: Tensor, vocabulary: int) -> Tensor:
    """Bits of the Philox words at ``positions`` [p] int64, on their device: int64 [p, vocabulary]."""
    blocks = torch.arange((vocabulary + 3) // 4, device=positions.device)
    return _words_of(seed, positions[:, None], blocks[None]).flatten(1)[:, :vocabulary]


def _words_of(seed: int, positions: Tensor, blocks: Tensor) -> Tensor:
    """The four words of each block: int64 [..., 4]; ``positions`` and ``blocks`` broadcast to [...]."""
    zero = torch.zeros((), dtype=torch.int64, device=positions.device)
    counter, key = [blocks + 1, positions, zero, zero], [seed, TAG]
    for _ in range(10):
        high0, low0 = _multiplied(0xD2E7470EE14C6C93, counter[0])
        high1, low1 = _multiplied(0xCA5A826395121157, counter[2])
        counter = [high1 ^ counter[1] ^ _signed(key[0]), low1, high0 ^ counter[3] ^ _signed(key[1]), low0]
        key = [key[0] + 0x9E3779B97F4A7C15, key[1] + 0xBB67AE8584CAA73B]
    return torch.stack(torch.broadcast_tensors(*counter), -1)


def _multiplied(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 128-bit product, as int64 bits, from products of 32-bit limbs."""
    a_low, a_high = factor % _WIDE, factor // _WIDE
    x_low, x_high = x & (_WIDE - 1), _upper(x)
    low, first, second = x_low * a_low, x_low * a_high, x_high * a_low
    carry = _upper(low) + (first & (_WIDE - 1)) + (second & (_WIDE - 1))
    return x_high * a_high + _upper(first) + _upper(second) + _upper(carry), x * _signed(factor)


def _upper(x: Tensor) -> Tensor:
    return (x >> 32) & (_WIDE - 1)


def _signed(word: int) -> int:
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word


def _gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    """-log(-log(u)), in float64 like the definition."""
    u = ((words >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)
    return u.log_().neg_().log_().neg_().to(dtype)
