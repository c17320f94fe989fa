"""Whether a kind of weights multiplies correctly on a device: a product beside the same one in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from flowspec_edge.boards.gpu_check.computations import Deviation
from flowspec_edge.errors import FlowspecError
from flowspec_edge.stage.quant.base import KINDS as QUANTISED
from flowspec_edge.stage.quant.grouped import kernel as int4_kernel
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.util.tensors import DTYPES, parse_dtype

KINDS = ("fp32", "bf16", "fp16", *QUANTISED)  # weights in full, and in 4 bits
_MAX_SIDE = 1024  # rows and columns of a checked matrix
_QUANTISED_WITHIN = 0.2  # of the weights' norm; 4 bits lose about 0.1


@torch.inference_mode()
def product(kind: str, device: str, shape: Sequence[int], rows: Sequence[int], dtype: str) -> Deviation:
    """Multiply each number of ``rows`` with a matrix whose weights are of ``kind``; the greatest difference.

    shape  of the matrix: (outputs, inputs)
    dtype  of activations, for kinds in 4 bits
    """
    at, (outputs, inputs) = torch.device(device), (min(side, _MAX_SIDE) for side in shape)
    activation_type = activations(kind, dtype)
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(outputs, inputs, generator=generator)
    if kind in DTYPES:
        rounded = weight.to(activation_type)
        exact = rounded.double()
        multiply: Callable[[Tensor], Tensor] = partial(functional.linear, weight=rounded.to(at))
    else:
        weight_scheme = scheme(next(k for k in QUANTISED if k == kind))
        stored = weight_scheme.quantise(weight.to(at))
        exact = weight_scheme.dequantise(stored).cpu().double()
        lost = float((exact - weight).norm() / weight.norm())
        if not lost < _QUANTISED_WITHIN:
            raise FlowspecError(f"quantising loses {lost:.0%} of the weights' norm")
        multiply = linear = weight_scheme.linear(outputs, inputs, False, activation_type, at)
        linear.fill(stored)
    worst = 0.0
    for n in rows:
        x = torch.randn(n, inputs, generator=generator).to(activation_type)
        expected = x.double() @ exact.T
        computed = multiply(x.to(at))
        difference = (computed.cpu().double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(difference)) if bool(difference.isfinite()) else float("inf")
    return Deviation(worst, computed_in(kind, dtype, at))


def activations(kind: str, dtype: str) -> torch.dtype:
    """Return the activations' type in a product; unquantised kinds use their own."""
    return DTYPES[kind] if kind in DTYPES else parse_dtype(dtype)


def computed_in(kind: str, dtype: str, device: torch.device) -> str:
    """Return the type that a product rounds to: bf16 in int4's kernels, even on a GPU with fp16 activations."""
    if kind == "int4" and int4_kernel(activations(kind, dtype), device):
        return "bf16"
    return kind if kind in DTYPES else dtype
