"""Grouped int4: q in 0..15, one scale and one zero for a group of neighbours in a row, PyTorch's kernels.

    w = (q - 8) * scale + zero

in float32, with scale and zero stored in bfloat16.  PyTorch's kernels take bfloat16 activations: the CPU's
with AVX2 or better (elsewhere it is a loop, and right), the GPU's from compute capability 8.0 on, where
fp16 activations go through bfloat16.  Everything else *expands*: slices of rows become float32 and are
multiplied in float32, so that only a few MB are ever unpacked and results differ from a dense product by
rounding alone.  Knows neither files nor models.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flowspec_edge.errors import UsageError
from flowspec_edge.stage.grouped_fit import quantise_groups
from flowspec_edge.stage.quant import DEFAULT_GROUP, Kind, QuantLinear, Scheme, slices

GROUPS = (32, 64, 128, 256)  # that the kernels take
_ROWS = 16  # the CPU's kernel takes multiples of this many rows of a matrix; the GPU's, of 8
_EXPANDED_WEIGHTS = 1 << 20  # at a time: 4 MB in float32, which stay in a cache
_FITTED_WEIGHTS = 1 << 17  # at a time: what the fit works on stays in a cache


class GroupedScheme(Scheme):
    """Grouped int4; ``group`` weights of a row, or fewer where that does not divide the row, share a
    scale and a zero.  UsageError for a group that no kernel takes."""

    kind: Kind = "int4"

    def __init__(self, group: int = DEFAULT_GROUP) -> None:
        if group not in GROUPS:
            raise UsageError(f"no int4 groups of {group}: use one of {', '.join(map(str, GROUPS))}")
        self.group = group

    def fits(self, rows: int, columns: int) -> int | None:
        if rows % _ROWS or not rows:
            return None
        return max((g for g in GROUPS if g <= self.group and columns % g == 0 and columns), default=None)

    def stored(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        groups = columns // self.group_of(rows, columns)
        return {
            "qweight": ((rows, columns // 2), torch.uint8),
            "scales": ((rows, groups), torch.bfloat16),
            "zeros": ((rows, groups), torch.bfloat16),
        }

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        group = self.group_of(_ROWS, weight.shape[1])  # of any slice, whatever its number of rows
        parts = [quantise_groups(weight[lo:hi], group)
                 for lo, hi in slices(len(weight), weight.shape[1], _FITTED_WEIGHTS)]
        codes, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return {"qweight": codes, "scales": scales, "zeros": zeros}

    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        return expand(stored["qweight"], stored["scales"], stored["zeros"])

    def caveat(self, dtype: torch.dtype, capability: tuple[int, int]) -> str:
        if dtype != torch.float16 or capability < (8, 0):
            return ""
        return ("int4 with fp16 activations: they are converted to bf16 and back for each product, 8 more "
                "kernel launches a layer; shard the model with --compute-dtype bf16")

    def linear(self, rows: int, columns: int, bias: bool, dtype: torch.dtype,
               device: torch.device | str = "cpu") -> QuantLinear:
        group, at = self.group_of(rows, columns), torch.device(device)
        match kernel(dtype, at):
            case "cpu":
                return CpuLinear(self, rows, columns, bias, dtype, at, group)
            case "cuda":
                return CudaLinear(self, rows, columns, bias, dtype, at, group)
            case _:
                return ExpandingLinear(self, rows, columns, bias, dtype, at, group)


def kernel(dtype: torch.dtype, device: torch.device) -> Literal["cpu", "cuda"] | None:
    """Whose int4 product is used for activations of ``dtype``; None: weights are expanded."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "cpu"
    if (device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
            and torch.cuda.get_device_capability(device) >= (8, 0)):
        return "cuda"
    return None


def unpack(packed: Tensor) -> Tensor:
    """The codes 0..15 in ``packed``: uint8 [n, k]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def expand(packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weights that the codes stand for: float32 [n, k]."""
    rows, groups = scales.shape
    weights = torch.empty((rows, packed.shape[1], 2), dtype=torch.float32, device=packed.device)
    weights[..., 0] = packed & 15
    weights[..., 1] = packed >> 4
    grouped = weights.view(rows, groups, -1)  # in place, all along: this is what fp32 activations wait for
    grouped.sub_(8).mul_(scales.float()[..., None]).add_(zeros.float()[..., None])
    return weights.view(rows, -1)


class GroupedLinear(QuantLinear):
    """What the three ways to multiply share: groups, and rows of any number and shape."""

    row_dims: ClassVar[Mapping[str, int]] = {"scales_zeros": 1}

    def __init__(self, scheme: GroupedScheme, rows: int, columns: int, bias: bool, dtype: torch.dtype,
                 device: torch.device, group: int) -> None:
        super().__init__(scheme, rows, columns, bias, dtype, device)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if not len(flat):
            return x.new_empty((*x.shape[:-1], self.out_features))
        y = self.product(flat)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ for x [n, in_features], n at least 1."""


class ExpandingLinear(GroupedLinear):
    """Keeps what is stored; expands slices of rows to float32 and multiplies in float32."""

    def __init__(self, scheme: GroupedScheme, rows: int, columns: int, bias: bool, dtype: torch.dtype,
                 device: torch.device, group: int) -> None:
        super().__init__(scheme, rows, columns, bias, dtype, device, group)
        for name, (shape, stored) in scheme.stored(rows, columns).items():
            self.keep(name, torch.empty(shape, dtype=stored, device=device))

    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        for name, tensor in stored.items():
            self.get_buffer(name)[lo:lo + len(tensor)].copy_(tensor)

    def product(self, x: Tensor) -> Tensor:
        qweight, scales, zeros = (self.get_buffer(name) for name in ("qweight", "scales", "zeros"))
        y = torch.empty((len(x), self.out_features), dtype=torch.float32, device=x.device)
        wide = x.float()
        for lo, hi in slices(self.out_features, self.in_features, _EXPANDED_WEIGHTS):
            y[:, lo:hi] = functional.linear(wide, expand(qweight[lo:hi], scales[lo:hi], zeros[lo:hi]))
        return y.to(x.dtype)


class CpuLinear(GroupedLinear):
    """PyTorch's int4 product on the CPU, in bfloat16.

    Its packed layout takes 16, 32 or 64 rows together, as wide as the vectors are; slices that start at
    multiples of all of them pack to what the whole packs to.
    """

    def __init__(self, scheme: GroupedScheme, rows: int, columns: int, bias: bool, dtype: torch.dtype,
                 device: torch.device, group: int) -> None:
        super().__init__(scheme, rows, columns, bias, dtype, device, group)
        self.keep("packed", torch.empty((rows, columns // 2), dtype=torch.uint8))
        self.keep("scales_zeros", torch.empty((columns // group, rows, 2), dtype=torch.bfloat16))

    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        hi = lo + len(stored["qweight"])
        codes = unpack(stored["qweight"]).int()
        self.get_buffer("packed")[lo:hi] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        _fill_scales_zeros(self.get_buffer("scales_zeros"), lo, stored)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.get_buffer("packed"), self.group, self.get_buffer("scales_zeros"))


class CudaLinear(GroupedLinear):
    """PyTorch's int4 product on a GPU, in bfloat16; activations in fp16 are converted.

    It reads all weights once for every 16 rows.  Writing the matrix out for cuBLAS instead costs more up to
    some 150 rows, even if it were one kernel: 4.5 bytes a weight (read 0.5, write 2, read 2) against 0.5.
    So it is used for any number of rows.

    Packed: int32 [rows / 8, columns / (16 inner), 32, inner / 2], for tiles of 8 x 16 weights, ``inner``
    of them together.
    """

    def __init__(self, scheme: GroupedScheme, rows: int, columns: int, bias: bool, dtype: torch.dtype,
                 device: torch.device, group: int) -> None:
        super().__init__(scheme, rows, columns, bias, dtype, device, group)
        self.inner = next(inner for inner in (8, 4, 2) if columns % (16 * inner) == 0)
        packed = (rows // 8, columns // (16 * self.inner), 32, self.inner // 2)
        self.keep("packed", torch.empty(packed, dtype=torch.int32, device=device))
        self.keep("scales_zeros",
                  torch.empty((columns // group, rows, 2), dtype=torch.bfloat16, device=device))

    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        hi = lo + len(stored["qweight"])
        packed = self.get_buffer("packed")
        stored = {name: tensor.to(packed.device) for name, tensor in stored.items()}
        swapped = (stored["qweight"] << 4) | (stored["qweight"] >> 4)  # the even column in the high half
        packed[lo // 8:hi // 8] = torch.ops.aten._convert_weight_to_int4pack(swapped, self.inner)
        _fill_scales_zeros(self.get_buffer("scales_zeros"), lo, stored)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(
            x.to(torch.bfloat16).contiguous(), self.get_buffer("packed"), self.group,
            self.get_buffer("scales_zeros")).to(x.dtype)


def _fill_scales_zeros(scales_zeros: Tensor, lo: int, stored: Mapping[str, Tensor]) -> None:
    """Both in one tensor [groups, rows, 2], as the kernels want them."""
    hi = lo + len(stored["scales"])
    scales_zeros[:, lo:hi, 0] = stored["scales"].t()
    scales_zeros[:, lo:hi, 1] = stored["zeros"].t()
