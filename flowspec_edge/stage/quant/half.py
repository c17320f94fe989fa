"""Matrices in 16 bits under float32 activations, for CPUs: the element type "mixed".

A CPU decodes as fast as it reads weights, so half of the bytes is half of the time.  PyTorch multiplies float32 rows
with a matrix that it has packed in float16, and sums in float32 (FBGEMM; x86 with AVX2).  Weights are rounded to
float16; nothing else is.  A row's product has the same bits whatever rows are beside it.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.linears import replace_linears
from flowspec_edge.util.tensors import MIXED

_MOST = torch.finfo(torch.float16).max


class HalfLinear(nn.Module):
    """y = x Wᵀ + b for x [..., in_features] in float32, with W packed in float16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Round ``weight`` [n, k] of any floating type, which is not kept.

        FlowspecError if float16 does not hold a value.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        least, most = (bound.item() for bound in torch.aminmax(weight))
        if not -_MOST <= least <= most <= _MOST:
            raise FlowspecError(f"a weight is {max(-least, most):.3g}, and 16 bits hold {_MOST:.0f} at most: "
                                "use --dtype fp32")
        self._packed = _pack(weight, bias)
        self.packed_bytes = 2 * self.out_features * self.in_features  # torch sees neither parameters nor buffers

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.quantized.linear_dynamic_fp16(x, self._packed))


def is_mixed(dtype: str, device: torch.device | str) -> bool:
    """Whether matrices are to be packed; UsageError where that is impossible."""
    if dtype != MIXED:
        return False
    if torch.device(device).type != "cpu":
        raise UsageError(f"--dtype {MIXED} is for CPUs: use fp16 or bf16 on {device}")
    if not _packs():
        raise UsageError(f"--dtype {MIXED} needs an x86 CPU with AVX2, and PyTorch has no such product here: use fp32")
    return True


def halve_linears(module: nn.Module) -> None:
    """Replace the linears of ``module``."""
    replace_linears(module, lambda linear: HalfLinear(linear.weight, linear.bias))


def round_linears(module: nn.Module) -> None:
    """Give the linears of ``module`` the values that :func:`halve_linears` would, in their own type."""
    for linear in [part for part in module.modules() if type(part) is nn.Linear]:
        linear.weight = nn.Parameter(linear.weight.half().to(linear.weight.dtype), requires_grad=False)


def _pack(weight: Tensor, bias: Tensor | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that eager quantisation moves to another package
        return torch.ops.quantized.linear_prepack_fp16(
            weight.detach().float().contiguous(), None if bias is None else bias.detach().float())


@cache
def _packs() -> bool:
    try:
        packed = _pack(torch.zeros(1, 1), None)
        torch.ops.quantized.linear_dynamic_fp16(torch.zeros(1, 1), packed)
    except RuntimeError:
        return False
    return True
