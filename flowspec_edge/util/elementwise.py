"""Activations whose results do not depend on where a value lies.

On a CPU PyTorch computes what is left of an array behind the last whole vectors by other instructions, which may round
differently.  So the result of a row would depend on how many rows there are, unless a row is whole vectors.
``exp`` and ``log1p`` have one form for all values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_VECTORS = 64  # values of 16 bits in two vectors of 512 bits, which one step of PyTorch's loops takes


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x [..., width]."""
    return x.sigmoid() if _whole(x) else _sigmoid(x).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return x [..., width] times its sigmoid."""
    return F.silu(x) if _whole(x) else (x * _sigmoid(x)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) of x [..., width]."""
    return F.softplus(x) if _whole(x) else (x.float().abs().neg().exp().log1p() + x.clamp(min=0)).to(x.dtype)


def _whole(x: Tensor) -> bool:
    return x.device.type != "cpu" or x.shape[-1] % _VECTORS == 0


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x.float()))
