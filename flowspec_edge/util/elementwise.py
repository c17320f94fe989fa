"""Activations whose results do not depend on where a value lies.

On a CPU PyTorch's ``sigmoid``, ``silu``, ``softplus`` and ``gelu`` with tanh compute what is left of a thread's share
behind the last whole vectors by other instructions, which may round differently.  So a row's result would depend on
how many rows there are, and on the threads.  ``exp``, ``log1p`` and ``tanh`` have one form for all values.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x."""
    return _sigmoid(x).to(x.dtype) if _on_cpu(x) else x.sigmoid()


def silu(x: Tensor) -> Tensor:
    """Return x times its sigmoid."""
    return (x * _sigmoid(x)).to(x.dtype) if _on_cpu(x) else F.silu(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x))."""
    return (x.float().abs().neg().exp().log1p() + x.clamp(min=0)).to(x.dtype) if _on_cpu(x) else F.softplus(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return ``gelu`` of x as approximated with tanh."""
    if not _on_cpu(x):
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide.pow(3))
    return (0.5 * wide * (1 + inner.tanh())).to(x.dtype)


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x.float()))
