"""The schemes of quantised weights by name, and the replacement of a module's linears.

int8, for lm_head, draft models and matrices of GGUF files, is two int4 planes, so that int4's kernels compute it, too:

    w = q * scale,    q = 16 * high + low,    high, low in -8..7

Both planes share the groups' scales, in bfloat16, and have no zeros.  PyTorch 2.8 has no 8-bit product for
few rows on a GPU; the planes read one byte a weight, half of 16 bits, in two launches.

bitsandbytes' nf4 and fp4 are 16 fixed values, scaled by the largest weight of each block of 64.  The stored
tensors are those of the library's modules without nested quantisation, one row per matrix row.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.manifest import HeadBits
from flowspec_edge.stage.quant.base import (
    KINDS,
    Kind,
    QuantLinear,
    Scheme,
    require_finite,
    slices,
)
from flowspec_edge.stage.quant.grouped import GroupedScheme, pack
from flowspec_edge.stage.quant.sizes import DEFAULT_GROUP, draft_bits
from flowspec_edge.util.jetson import ORIN

_PLANE = 16  # the weight of the high plane
_MOST = 7 * _PLANE + 7  # of |q|, so that both planes stay within -8..7
_CODES = ("packed", "qweight")  # what differs between the planes' modules


class Int8Scheme(Scheme):
    """Storage in 8 bits; ``group``: as for int4."""

    kind: Kind = "int8"

    def __init__(self, group: int = DEFAULT_GROUP) -> None:
        self.plane = GroupedScheme(group)

    def fits(self, rows: int, columns: int) -> int | None:
        return self.plane.fits(rows, columns)

    def stored(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        groups = columns // self.group_of(rows, columns)
        return {"qweight": ((rows, columns), torch.int8), "scales": ((rows, groups), torch.bfloat16)}

    def nbytes(self, rows: int, columns: int) -> int:
        return self.plane.nbytes(rows, columns) + rows * columns // 2

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        require_finite(weight)
        rows, columns = weight.shape
        w = weight.float().view(rows, -1, self.group_of(_PLANE, columns))
        # Rounded up to bfloat16: a smaller scale would clip the largest weight.
        scales = (w.abs().amax(-1) / _MOST * (1 + 2**-8)).to(torch.bfloat16)
        inverse = torch.where(scales > 0, 1 / scales.float(), 0)[..., None]
        codes = (w * inverse).round_().clamp_(-_MOST, _MOST)
        return {"qweight": codes.to(torch.int8).view(rows, columns), "scales": scales}

    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        codes, scales = stored["qweight"], stored["scales"].float()
        return (codes.float().view(*scales.shape, -1) * scales[..., None]).view(codes.shape)

    def linear(self, rows: int, columns: int, bias: bool, dtype: torch.dtype,
               device: torch.device | str = "cpu") -> QuantLinear:
        return Int8Linear(self, rows, columns, bias, dtype, torch.device(device))


class Int8Linear(QuantLinear):
    scheme: Int8Scheme

    def allocate(self, device: torch.device) -> None:
        rows, columns, plane = self.out_features, self.in_features, self.scheme.plane
        self.high, self.low = (plane.linear(rows, columns, False, self.dtype, device) for _ in range(2))
        for name, buffer in self.high.named_buffers():
            if name not in _CODES:  # the scales are in memory once
                self.low.register_packed(name, buffer)

    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        codes, scales = stored["qweight"].short(), stored["scales"]
        high = (codes + _PLANE // 2) >> 4
        zeros = torch.zeros_like(scales)
        for module, plane in ((self.high, high), (self.low, codes - _PLANE * high)):
            module.fill_rows(lo, {"qweight": pack((plane + 8).to(torch.uint8)), "scales": scales,
                                  "zeros": zeros})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.low(x).add_(self.high(x), alpha=_PLANE)
        return y if self.bias is None else y.add_(self.bias)

    @property
    def looks_up_rows(self) -> bool:  # type: ignore[override]
        return self.low.looks_up_rows

    def logits_at(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.low.logits_at(x, ids).add(self.high.logits_at(x, ids), alpha=_PLANE)


BLOCK = 64
_MINIMUM = "0.49"  # the first version with both kinds on CPUs and on GPUs


@cache
def library() -> Any:
    """Return the package bitsandbytes; UsageError if it is missing or does not load."""
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
        """Return what to know of a product's speed on a GPU; "" for nothing.

        For more than 4 rows the library expands the whole matrix first on an Orin, which takes longer than a
        product with
        fp16 weights.
        """
        if capability != ORIN:
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


def scheme(kind: Kind, group: int = DEFAULT_GROUP) -> Scheme:
    """Return the scheme of this kind; UsageError for an unknown kind or group, or without bitsandbytes.

    int4      PyTorch's grouped int4; ``group``: 32, 64, 128 or 256 weights share a scale and a zero
    nf4, fp4  bitsandbytes, always in blocks of 64
    int8      two planes of int4; ``group`` as for int4
    """
    if kind == "int4":
        return GroupedScheme(group)
    if kind == "int8":
        return Int8Scheme(group)
    if kind in KINDS:
        return BnbScheme(kind)
    raise UsageError(f"no kind of quantised weights {kind!r}: use one of {', '.join(KINDS)}")


@dataclass(frozen=True)
class LayerSchemes:
    """How a model's decoder layers are stored.

    Matrices are stored by ``usual``, but for ``eight`` (names without ``.weight``), which are in int8.
    """

    usual: Scheme
    eight: frozenset[str] = frozenset()
    int8: Scheme = field(default_factory=Int8Scheme)  # one for all: matrices of one scheme can be joined

    def scheme_for(self, prefix: str) -> Scheme:
        return self.int8 if prefix in self.eight else self.usual


def head_scheme(bits: HeadBits) -> Scheme | None:
    """Return the scheme of lm_head; None for "16bit"."""
    return None if bits == "16bit" else scheme(bits)


def draft_scheme(lm_head: HeadBits) -> Scheme | None:
    """Return the scheme of draft heads beside such an lm_head (``sizes.draft_bits``)."""
    return head_scheme(draft_bits(lm_head))


@torch.no_grad()
def quantise_linears(module: nn.Module, scheme: Scheme, device: torch.device) -> None:
    """Replace the linears of ``module`` whose shape the scheme takes.

    They compute on ``device``, in the dtype of the weight that they replace. Linears on the meta device stay.
    """
    for path in [path for path, part in module.named_modules() if isinstance(part, nn.Linear)]:
        linear = cast(nn.Linear, module.get_submodule(path))  # no list holds those that are replaced
        if scheme.fits(*linear.weight.shape) is None or any(p.is_meta for p in linear.parameters()):
            continue
        rows, columns = linear.weight.shape
        packed = scheme.linear(rows, columns, linear.bias is not None, linear.weight.dtype, device)
        for lo, hi in slices(rows, columns):
            packed.fill_rows(lo, scheme.quantise(linear.weight[lo:hi].to(device)))
        if packed.bias is not None:
            packed.bias.copy_(linear.bias)
        parent, _, child = path.rpartition(".")
        setattr(module.get_submodule(parent), child, packed)
