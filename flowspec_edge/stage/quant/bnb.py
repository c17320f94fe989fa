"""bitsandbytes' nf4 and fp4: 16 fixed values, scaled by the largest weight of each block of 64.

The stored tensors are those of the library's modules without nested quantisation, one row per matrix row.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.quant.base import Kind, QuantLinear, Scheme, require_finite

BLOCK = 64
# Orin's compute capability: for more than 4 rows the library expands the whole matrix first, which takes
# longer than a product with fp16 weights.
EXPANDING = (8, 7)
_MINIMUM = "0.49"  # the first version with both kinds on CPUs and on GPUs


@cache
def library() -> Any:
    """The package bitsandbytes; UsageError if it is missing or does not load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backends that are not used
            return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise UsageError("nf4 and fp4 need bitsandbytes, which cannot be imported here "
                         f"({str(error).splitlines()[0]}): in flowspec's clone, pip install "
                         "'.[int4]' (for a Jetson build it: Dockerfile.jetson), or use int4") from error


class BnbScheme(Scheme):
    """nf4 (quantiles of the normal distribution) or fp4 (floats of 4 bits)."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.functions = library().functional

    def fits(self, rows: int, columns: int) -> int | None:
        return BLOCK if rows > 0 and columns > 0 and columns % BLOCK == 0 else None

    def stored(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        block = self.group_of(rows, columns)
        return {
            "qweight": ((rows, columns // 2), torch.uint8),
            "absmax": ((rows, columns // block), torch.float32),
        }

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        self.group_of(rows, columns)
        require_finite(weight)
        try:
            packed, state = self.functions.quantize_4bit(
                weight.contiguous(), blocksize=BLOCK, quant_type=self.kind, compress_statistics=False)
        except RuntimeError as error:  # versions before 0.49 lack kinds on a CPU
            raise FlowspecError(f"bitsandbytes {library().__version__} cannot quantise to {self.kind} on "
                                f"{weight.device.type} ({str(error).splitlines()[0]}): use {_MINIMUM} or "
                                "newer, or int4") from error
        return {"qweight": packed.view(rows, columns // 2), "absmax": state.absmax.view(rows, -1)}

    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        qweight, absmax = stored["qweight"], stored["absmax"]
        state = self.state(absmax, qweight.shape[1] * 2, torch.float32)
        weights: Tensor = self.functions.dequantize_4bit(qweight.reshape(-1, 1), state)
        return weights

    def caveat(self, dtype: torch.dtype, capability: tuple[int, int]) -> str:
        if capability != EXPANDING:
            return ""
        return (f"{self.kind} on a GPU of compute capability 8.7: bitsandbytes unpacks the whole matrix for "
                "every product of more than 4 rows, which int4 does not: flowspec models shard --dtype int4")

    def linear(self, rows: int, columns: int, bias: bool, dtype: torch.dtype,
               device: torch.device | str = "cpu") -> QuantLinear:
        return BnbLinear(self, rows, columns, bias, dtype, torch.device(device))

    def state(self, absmax: Tensor, columns: int, dtype: torch.dtype) -> Any:
        return self.functions.QuantState(
            absmax=absmax.reshape(-1), shape=torch.Size((len(absmax), columns)), dtype=dtype,
            code=self.functions.get_4bit_type(self.kind, device=absmax.device, blocksize=BLOCK),
            blocksize=BLOCK, quant_type=self.kind)


class BnbLinear(QuantLinear):
    def __init__(self, scheme: BnbScheme, rows: int, columns: int, bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(scheme, rows, columns, bias, dtype, device)
        self._state = scheme.state(self.get_buffer("absmax"), columns, dtype)  # shares absmax
        self._product = library().matmul_4bit

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():  # not every version accepts zero rows
            return x.new_empty((*x.shape[:-1], self.out_features))
        packed = self.get_buffer("qweight").view(-1, 1).t()
        y: Tensor = self._product(x, packed, quant_state=self._state, bias=self.bias)
        return y
