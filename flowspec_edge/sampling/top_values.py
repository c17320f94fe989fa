"""The largest values of long rows, by two short searches instead of a long one."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = 6
_BLOCK = 1 << _BITS  # of a row
_CPU_VALUES = 200_000  # of a chunk of rows that stays in a core's cache


def chunks(logits: Tensor) -> list[slice]:
    """Rows to process together: on a CPU as many as stay in its cache."""
    n, vocabulary = logits.shape
    parts = -(-n * vocabulary // _CPU_VALUES) if logits.device.type == "cpu" else 1
    step = max(1, -(-n // max(parts, 1)))
    return [slice(lo, lo + step) for lo in range(0, n, step)]


def first_largest(x: Tensor) -> Tensor:
    """First index of each maximum: int64 [n]; in blocks, since torch's argmax is slow for long CPU rows."""
    n, width = x.shape
    whole = width // _BLOCK * _BLOCK
    if whole < 4 * _BLOCK:
        return x.argmax(-1)
    blocks = x[:, :whole].view(n, -1, _BLOCK)
    block = blocks.amax(-1).argmax(-1)
    rows = torch.arange(n, device=x.device)
    best = blocks[rows, block].argmax(-1) + block * _BLOCK
    if whole < width:
        rest = x[:, whole:].argmax(-1) + whole
        best = torch.where(x[rows, rest] > x[rows, best], rest, best)
    return best


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, falling, and their indices: [n, k] and int64 [n, k]."""
    n, width = x.shape
    whole = width // _BLOCK * _BLOCK
    if whole < 4 * k * _BLOCK:
        top = x.topk(k)
        return top.values, top.indices
    blocks = x[:, :whole].view(n, -1, _BLOCK)
    chosen = blocks.amax(-1).topk(k, sorted=False).indices
    values = blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    if whole < width:
        values = torch.cat((values, x[:, whole:]), 1)
    top = values.topk(k)
    at = top.indices  # in the chosen blocks, one after the other; then in the rest of the row
    if whole == width:
        return top.values, chosen.gather(1, at >> _BITS).mul_(_BLOCK).add_(at & (_BLOCK - 1))
    inside = at.clamp(max=k * _BLOCK - 1)
    places = chosen.gather(1, inside >> _BITS).mul_(_BLOCK).add_(inside & (_BLOCK - 1))
    return top.values, torch.where(at < k * _BLOCK, places, at + (whole - k * _BLOCK))


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def packed(ids: Tensor, *values: Tensor) -> Tensor:
    """One tensor for one transfer; float32 holds ids up to 2^24 exactly."""
    return torch.cat((ids.to(values[0].dtype), *values), 1)


def fetched(parts: list[Tensor]) -> NDArray[np.float64]:
    return np.concatenate([part.cpu().numpy() for part in parts]).astype(np.float64)
