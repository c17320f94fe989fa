"""Grouped int4 matrices in 16 bits, out of the layout in which a GPU's kernel wants them, for products of many rows.

The kernel reads the weights again for every few rows.  For many rows a matrix product in 16 bits is faster, although
the weights have to be written and read once more.  The layout is PyTorch's and not documented: it is tried on a small
matrix before it is relied on.  (On a CPU no segment has as many rows as that takes: docs/experiments/costs.md.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

_TILE, _LANES = 8, 4  # rows of a tile, and lanes of a row in it
_WORD_COLUMNS = 32  # columns of a row's lanes in one word each


# One word of codes has the columns 2 j, 2 j + 1 of its eight in bits 4 j and 4 j + 16; the other arguments are the
# scale and the zero of a group, and 4 j.  ``order`` only says in which order results lie in memory.
_PAIR = """
template <typename T> T expand_pair(T order, T codes, T both, T shift) {
  float scale = __int_as_float(both << 16), zero = __int_as_float(both & 0xffff0000);
  int low = __float_as_int(fmaf(float((codes >> shift) & 15) - 8.0f, scale, zero));
  int high = __float_as_int(fmaf(float((codes >> (shift + 16)) & 15) - 8.0f, scale, zero));
  low += 0x7fff + ((low >> 16) & 1);
  high += 0x7fff + ((high >> 16) & 1);
  return ((low >> 16) & 0xffff) | (high & 0xffff0000);
}
"""
Pairs = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def pairs_by_operations(order: Tensor, codes: Tensor, both: Tensor, shift: Tensor) -> Tensor:
    """Return what :data:`_PAIR` computes, in a dozen passes over memory."""
    scale, zero = (both << 16).view(torch.float32), (both & -65536).view(torch.float32)
    weights = [(((codes >> by) & 15) - 8).float().mul(scale).add_(zero) for by in (shift, shift + 16)]
    return torch.stack(weights, -1).to(torch.bfloat16).contiguous().view(torch.int32).squeeze(-1)


@cache
def _pairs_at_once() -> Pairs:
    """One kernel, which PyTorch compiles when it is first called."""
    kernel: Any = torch.cuda.jiterator._create_jit_fn(_PAIR)
    return cast(Pairs, kernel)


def rows_of_tiles(packed: Tensor, scales_zeros: Tensor, group: int, pairs: Pairs | None = None) -> Tensor:
    """Return the weights of rows in the GPU's layout, in bfloat16: [rows, columns].

    packed        [rows / 8, runs, 32, words], int32: of each tile of rows and run of columns, lane by lane
    scales_zeros  [columns / group, rows, 2]
    pairs         None: one kernel
    """
    tiles, runs, _, words = packed.shape
    wide = max(1, group // (_WORD_COLUMNS * words))  # runs of a group
    narrow = max(1, _WORD_COLUMNS * words // group)  # groups of a run
    shape = tiles, _TILE, runs // wide, wide, narrow, words // narrow, 4, _LANES
    codes = (packed.view(tiles, runs // wide, wide, _TILE, _LANES, narrow, words // narrow)
             .permute(0, 3, 1, 2, 5, 6, 4).unsqueeze(-2).expand(shape))
    both = (scales_zeros.view(torch.int32).view(runs // wide, narrow, tiles, _TILE).permute(2, 3, 0, 1)
            [:, :, :, None, :, None, None, None].expand(shape))
    shift = torch.arange(0, 16, 4, dtype=torch.int32, device=packed.device)[:, None].expand(shape)
    words_of_pairs = (pairs or _pairs_at_once())(_order(shape, packed.device), codes, both, shift)
    return words_of_pairs.view(tiles * _TILE, runs * words * _WORD_COLUMNS // 2).view(torch.bfloat16)


def _order(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a tensor of ``shape`` whose strides fall: results of several operands lie in memory as the first one's.

    Its elements share a few bytes.
    """
    strides = tuple(range(len(shape), 0, -1))
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(last + 1, dtype=torch.int32, device=device).as_strided(shape, strides)


@cache
@cache
def expands_tiles(inner: int, group: int, device: torch.device) -> bool:
    """Whether :func:`rows_of_tiles` knows the layout on ``device``, with one kernel."""
    rows, columns = 64, 2 * max(16 * inner, group)
    codes = torch.arange(rows * columns // 2, device=device).mul_(97).remainder_(251).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes.view(rows, columns // 2), inner)
    scales = torch.rand(columns // group, rows, 2, device=device).to(torch.bfloat16)
    scale, zero = scales.permute(2, 1, 0).float().repeat_interleave(group, -1)
    expected = torch.stack([codes >> 4, codes & 15], -1).view(rows, columns).float().sub_(8).mul_(scale).add_(zero)
    expanded = rows_of_tiles(packed, scales.contiguous(), group).float()
    # The kernel's multiplication and addition round once, these twice.
    return bool(((expanded - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all())
