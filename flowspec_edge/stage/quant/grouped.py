"""Grouped int4: codes q in 0..15, with one scale and one zero per group of neighbours in a row.

    w = (q - 8) * scale + zero

in float32; scale and zero are stored in bfloat16.  PyTorch's kernels take bfloat16 activations: on CPUs with
AVX2 or better (elsewhere a slow, correct loop), on GPUs from compute capability 8.0 on.  Otherwise slices of
rows are *expanded* to float32, a few MB at a time; results differ from a dense product only by rounding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.quant.base import Kind, QuantLinear, Scheme, slices
from flowspec_edge.stage.quant.expanded import expands_tiles, rows_of_tiles
from flowspec_edge.stage.quant.sizes import DEFAULT_GROUP, EXPANDED_BYTES, GROUPS, ROWS, group_for

_EXPANDED_WEIGHTS = 1 << 20  # at a time: 4 MB in float32, which stay in a CPU cache
_FITTED_WEIGHTS = 1 << 17  # at a time, so that the fit stays in a CPU cache


_expands: ContextVar[bool] = ContextVar("expands", default=False)


@contextmanager
def expanding(allowed: bool) -> Iterator[None]:
    """Let products of many rows multiply expanded weights, whose last bits are others than the kernel's.

    ``allowed`` for rows of text that are alone in their pass, a prompt's: a row of a tree or of another request has the
    same bits whatever rows are beside it.
    """
    before = _expands.set(allowed)
    try:
        yield
    finally:
        _expands.reset(before)


class GroupedScheme(Scheme):
    """Storage in which ``group`` weights of a row share a scale and a zero, or fewer if that does not divide the row.

    UsageError for a group that no kernel supports.
    """

    kind: Kind = "int4"

    def __init__(self, group: int = DEFAULT_GROUP) -> None:
        if group not in GROUPS:
            raise UsageError(f"no int4 groups of {group}: use one of {', '.join(map(str, GROUPS))}")
        self.group = group

    def fits(self, rows: int, columns: int) -> int | None:
        return group_for(rows, columns, self.group)

    def stored(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        groups = columns // self.group_of(rows, columns)
        return {
            "qweight": ((rows, columns // 2), torch.uint8),
            "scales": ((rows, groups), torch.bfloat16),
            "zeros": ((rows, groups), torch.bfloat16),
        }

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        group = self.group_of(ROWS, weight.shape[1])  # independent of the slice's number of rows
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
        at = torch.device(device)
        match kernel(dtype, at):
            case "cpu":
                return CpuLinear(self, rows, columns, bias, dtype, at)
            case "cuda":
                return CudaLinear(self, rows, columns, bias, dtype, at)
            case _:
                return ExpandingLinear(self, rows, columns, bias, dtype, at)


def kernel(dtype: torch.dtype, device: torch.device) -> Literal["cpu", "cuda"] | None:
    """Return the int4 kernel for activations of ``dtype``; None if weights are expanded."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "cpu"
    if (device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
            and torch.cuda.get_device_capability(device) >= (8, 0)):
        return "cuda"
    return None


def unpack(packed: Tensor) -> Tensor:
    """Return the codes 0..15 in ``packed``: uint8 [n, k]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def expand(packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the weights in float32: [n, k]."""
    rows, groups = scales.shape
    weights = torch.empty((rows, packed.shape[1], 2), dtype=torch.float32, device=packed.device)
    weights[..., 0] = packed & 15
    weights[..., 1] = packed >> 4
    grouped = weights.view(rows, groups, -1)  # in place throughout, for speed
    grouped.sub_(8).mul_(scales.float()[..., None]).add_(zeros.float()[..., None])
    return weights.view(rows, -1)


class GroupedLinear(QuantLinear):
    """A linear whose weights are quantised in groups.

    ``expands_from``: rows from which on a product multiplies weights that it has expanded to 16 bits, where
    :func:`expanding` lets it; None: it never does.
    """

    row_dims: ClassVar[Mapping[str, int]] = {"scales_zeros": 1}
    expands_from: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).contiguous()  # as the kernels demand
        if not len(flat):
            return x.new_empty((*x.shape[:-1], self.out_features))
        many = self.expands_from is not None and _expands.get() and len(flat) >= self.expands_from
        y = self.expanded_product(flat) if many else self.product(flat)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Multiply x Wᵀ for x [n, in_features], n at least 1."""

    def expanded_product(self, x: Tensor) -> Tensor:
        """Return the same with the weights in 16 bits, a slice at a time."""
        return self.product(x)


class ExpandingLinear(GroupedLinear):
    """Expands slices of rows to float32 and multiplies in float32."""

    looks_up_rows = True

    def logits_at(self, x: Tensor, ids: Tensor) -> Tensor:
        at = ids.flatten()
        rows = expand(*(self.get_buffer(name)[at] for name in ("qweight", "scales", "zeros")))
        return torch.matmul(rows.view(*ids.shape, -1), x.float()[..., None]).squeeze(-1).to(x.dtype)

    def product(self, x: Tensor) -> Tensor:
        qweight, scales, zeros = (self.get_buffer(name) for name in ("qweight", "scales", "zeros"))
        y = torch.empty((len(x), self.out_features), dtype=torch.float32, device=x.device)
        wide = x.float()
        for lo, hi in slices(self.out_features, self.in_features, _EXPANDED_WEIGHTS):
            y[:, lo:hi] = functional.linear(wide, expand(qweight[lo:hi], scales[lo:hi], zeros[lo:hi]))
        return y.to(x.dtype)


class CpuLinear(GroupedLinear):
    """PyTorch's int4 product on the CPU, in bfloat16.

    The packed layout groups 16, 32 or 64 rows, depending on the vector width, so slices that start at
    multiples of 64 pack to the same bytes as the whole.
    """

    def allocate(self, device: torch.device) -> None:
        rows, columns = self.out_features, self.in_features
        self.register_packed("packed", torch.empty((rows, columns // 2), dtype=torch.uint8))
        self.register_packed("scales_zeros",
                             torch.empty((columns // self.group, rows, 2), dtype=torch.bfloat16))

    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        hi = lo + len(stored["qweight"])
        codes = unpack(stored["qweight"]).int()
        self.get_buffer("packed")[lo:hi] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        _fill_scales_zeros(self.get_buffer("scales_zeros"), lo, stored)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.get_buffer("packed"), self.group, self.get_buffer("scales_zeros"))


class CudaLinear(GroupedLinear):
    """PyTorch's int4 product on a GPU, in bfloat16; fp16 activations are converted.

    It reads all weights once per 16 rows.  Expanding the matrix for cuBLAS moves 4.5 bytes per weight (read
    0.5, write 2, read 2) against 0.5: where the memory is the limit that pays beyond some 140 rows.  A stage measures
    when it does (``preparation.choose_products``).

    Packed: int32 [rows / 8, columns / (16 inner), 32, inner / 2], ``inner`` tiles of 8 x 16 at a time.
    """

    def allocate(self, device: torch.device) -> None:
        rows, columns = self.out_features, self.in_features
        self.inner = next(inner for inner in (8, 4, 2) if columns % (16 * inner) == 0)
        packed = (rows // 8, columns // (16 * self.inner), 32, self.inner // 2)
        self.register_packed("packed", torch.empty(packed, dtype=torch.int32, device=device))
        self.register_packed("scales_zeros",
                  torch.empty((columns // self.group, rows, 2), dtype=torch.bfloat16, device=device))

    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        hi = lo + len(stored["qweight"])
        packed = self.get_buffer("packed")
        stored = {name: tensor.to(packed.device) for name, tensor in stored.items()}
        swapped = (stored["qweight"] << 4) | (stored["qweight"] >> 4)  # the even column in the high half
        packed[lo // 8:hi // 8] = torch.ops.aten._convert_weight_to_int4pack(swapped, self.inner)
        _fill_scales_zeros(self.get_buffer("scales_zeros"), lo, stored)

    def product(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.get_buffer("packed"), self.get_buffer("scales_zeros"))

    @property
    def knows_layout(self) -> bool:
        """Whether weights can be expanded out of the layout of this device."""
        return expands_tiles(self.inner, self.group, self.get_buffer("packed").device)

    def expanded_product(self, x: Tensor) -> Tensor:
        packed, scales_zeros = self.get_buffer("packed"), self.get_buffer("scales_zeros")
        rows = x.to(torch.bfloat16)
        y = rows.new_empty(len(x), self.out_features)
        for lo, hi in slices(self.out_features, self.in_features, EXPANDED_BYTES // 2):
            part = scales_zeros[:, lo:hi].contiguous()
            torch.mm(rows, rows_of_tiles(packed[lo // 8 : hi // 8], part, self.group).t(), out=y[:, lo:hi])
        return y.to(x.dtype)

    def _multiply(self, x: Tensor, packed: Tensor, scales_zeros: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(
            x.to(torch.bfloat16), packed, self.group, scales_zeros).to(x.dtype)

    @property
    def looks_up_rows(self) -> bool:  # type: ignore[override]
        return rows_are_in_lanes(self.inner, self.get_buffer("packed").device)

    def logits_at(self, x: Tensor, ids: Tensor) -> Tensor:
        n, count = ids.shape
        if count % _TILE or not self.looks_up_rows:
            return super().logits_at(x, ids)
        at = ids.flatten()
        products = self._multiply(x, packed_rows(self.get_buffer("packed"), at),
                                  self.get_buffer("scales_zeros")[:, at].contiguous())
        return products.view(n, n, count).diagonal(dim1=0, dim2=1).t()


_TILE, _LANES = 8, 4  # rows of a tile of the GPU's layout, and lanes of a row in it


def packed_rows(packed: Tensor, ids: Tensor) -> Tensor:
    """Return the rows ``ids`` of a matrix in the GPU's layout, as a matrix in the same layout.

    The number of rows must be a multiple of 8.

    Each of a tile's 32 lanes holds weights of one row, of lane / 4.
    """
    tiles, runs, lanes, words = packed.shape
    by_row = packed.view(tiles, runs, _TILE, _LANES * words)
    rows = by_row[ids // _TILE, :, ids % _TILE].view(-1, _TILE, runs, _LANES * words)
    return rows.transpose(1, 2).reshape(-1, runs, lanes, words)


@cache
def rows_are_in_lanes(inner: int, device: torch.device) -> bool:
    """Whether PyTorch's layout on ``device`` is the one that :func:`packed_rows` knows: it is not documented."""
    width = 2 * 8 * inner  # two runs of columns
    codes = torch.arange(_TILE * _TILE * width, device=device).mul_(97).remainder_(251).to(torch.uint8)
    codes = codes.view(_TILE * _TILE, width)
    ids = torch.arange(_TILE, device=device) * (_TILE + 1)
    packed, some = (torch.ops.aten._convert_weight_to_int4pack(part, inner) for part in (codes, codes[ids]))
    return torch.equal(packed_rows(packed, ids), some)


def _fill_scales_zeros(scales_zeros: Tensor, lo: int, stored: Mapping[str, Tensor]) -> None:
    """Write scales and zeros to one tensor [groups, rows, 2], as the kernels expect them."""
    hi = lo + len(stored["scales"])
    scales_zeros[:, lo:hi, 0] = stored["scales"].t()
    scales_zeros[:, lo:hi, 1] = stored["zeros"].t()


LEVELS = 16
_MIDDLE = 8  # the code of ``zero`` itself
# First guesses: the levels span these fractions of a group's least and greatest weight.  Clipping makes the
# steps finer; clipping both ends by the same fraction gains only half as much.
_ENDS = ((1.0, 1.0), (0.95, 0.9), (0.9, 0.95), (0.85, 0.75), (0.75, 0.85))
_REFITS = 3  # least squares and rounding in turn, once the best ends are known


def quantise_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise [n, k], k a multiple of ``group``, with the least squared error that a search finds.

    Returns codes, two per byte, the even column in the low half: uint8 [n, k / 2]; scales and zeros:
    bfloat16 [n, k / group].

    For each of a few clippings the weights are rounded; linear regression of w on the codes gives the best
    scale and zero.  The best clipping wins, rounding and regression are repeated, and the codes are
    recomputed for the stored bfloat16 scale and zero.
    """
    rows, columns = weight.shape
    w = weight.float().reshape(-1, group)
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise FlowspecError("a weight is infinite or not a number: the checkpoint is damaged")
    fit = _Fit(w)
    for least, greatest in _ENDS:
        scale = (high * greatest - low * least) / (LEVELS - 1)
        fit.consider(scale, low * least + _MIDDLE * scale)
    for _ in range(_REFITS):
        fit.consider(fit.scale, fit.zero)
    scales, zeros = fit.scale.to(torch.bfloat16), fit.zero.to(torch.bfloat16)
    codes = fit.codes(scales.float(), zeros.float()).view(rows, columns).to(torch.uint8)
    return pack(codes), scales.view(rows, -1), zeros.view(rows, -1)


def pack(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 [n, k], as two per byte, the even column in the low half: uint8 [n, k / 2]."""
    return codes[:, 1::2].bitwise_left_shift(4).bitwise_or_(codes[:, ::2])


class _Fit:
    """The best scale and zero [m, 1] found so far for groups ``w`` [m, g]."""

    def __init__(self, w: Tensor) -> None:
        self.w = w
        self.mean = w.mean(1, keepdim=True)
        # A group of equal weights: any scale is right, with the mean as zero.
        self.scale, self.zero = torch.zeros_like(self.mean), self.mean.clone()
        self.gain = torch.zeros_like(self.mean)
        self._work = torch.empty_like(w)

    def codes(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the nearest codes 0..15, [m, g], in a buffer that the next call reuses."""
        # w * (1 / scale) + (8 - zero / scale) in two passes: a fused torch operation is several times slower.
        inverse = torch.where(scale > 0, 1 / scale, 0)
        offset = _MIDDLE - zero * inverse
        torch.mul(self.w, inverse, out=self._work)
        return self._work.add_(offset).round_().clamp_(0, LEVELS - 1)

    def consider(self, scale: Tensor, zero: Tensor) -> None:
        """Round with ``scale`` and ``zero``, fit both to the codes, and keep the fit where it is better.

        With q the codes, the squared error of the best line is var(w) - cov(q, w)² / var(q), all summed
        over the group; the second term is the ``gain``.
        """
        q = self.codes(scale, zero)
        n = self.w.shape[1]
        mean = q.mean(1, keepdim=True)
        variance = torch.linalg.vector_norm(q, dim=1, keepdim=True) ** 2 - n * mean * mean
        covariance = q.mul_(self.w).sum(1, keepdim=True) - n * mean * self.mean
        slope = torch.where(variance > 0.5, covariance / variance, 0)
        gain = slope * covariance
        better = gain > self.gain
        self.gain = torch.where(better, gain, self.gain)
        self.scale = torch.where(better, slope, self.scale)
        self.zero = torch.where(better, self.mean - (mean - _MIDDLE) * slope, self.zero)
