"""bitsandbytes' nf4 and fp4: 16 fixed values, scaled by the greatest weight of each block of 64.

Calls the library's functions on plain tensors, on the CPU and on CUDA; what is stored is what its own
modules store without nested quantisation, a row of the matrix a row.  The library is imported on first
use, since it is not everywhere.
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
from flowspec_edge.stage.quant import Kind, QuantLinear, Scheme, require_finite

BLOCK = 64
# The compute capability, Orin's, on which the library's product of more than 4 rows first expands the whole
# matrix, which takes longer than a product with fp16 weights.
EXPANDING = (8, 7)
_SURE = "0.49"  # both kinds work on CPUs and on GPUs


@cache
def library() -> Any:
    """The package bitsandbytes; UsageError where it is missing or does not load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of backends that are not used
            return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise UsageError("nf4 and fp4 need bitsandbytes, which cannot be imported here "
                         f"({str(error).splitlines()[0]}): pip install 'flowspec-edge[int4]', "
                         "or use int4") from error


class BnbScheme(Scheme):
    """nf4 (the 16 values are quantiles of the normal distribution) or fp4 (they are floats of 4 bits)."""

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
        except RuntimeError as error:  # a board may have a version before 0.49, which lacks kinds on a CPU
            raise FlowspecError(f"bitsandbytes {library().__version__} cannot quantise to {self.kind} on "
                                f"{weight.device.type} ({str(error).splitlines()[0]}): use {_SURE} or newer, "
                                "or int4") from error
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
        """What bitsandbytes wants to know of a matrix, beside its bytes."""
        return self.functions.QuantState(
            absmax=absmax.reshape(-1), shape=torch.Size((len(absmax), columns)), dtype=dtype,
            code=self.functions.get_4bit_type(self.kind, device=absmax.device, blocksize=BLOCK),
            blocksize=BLOCK, quant_type=self.kind)


class BnbLinear(QuantLinear):
    """bitsandbytes' own 4-bit product."""

    def __init__(self, scheme: BnbScheme, rows: int, columns: int, bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(scheme, rows, columns, bias, dtype, device)
        for name, (shape, stored) in scheme.stored(rows, columns).items():
            self.keep(name, torch.empty(shape, dtype=stored, device=device))
        self._state = scheme.state(self.get_buffer("absmax"), columns, dtype)  # shares absmax
        self._product = library().matmul_4bit

    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        for name, tensor in stored.items():
            self.get_buffer(name)[lo:lo + len(tensor)].copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():  # not every version takes no rows
            return x.new_empty((*x.shape[:-1], self.out_features))
        packed = self.get_buffer("qweight").view(-1, 1).t()
        y: Tensor = self._product(x, packed, quant_state=self._state, bias=self.bias)
        return y
