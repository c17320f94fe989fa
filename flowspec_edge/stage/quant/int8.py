"""int8, for lm_head and draft models: two int4 planes, so that int4's kernels compute it, too.

    w = q * scale,    q = 16 * high + low,    high, low in -8..7

Both planes share the groups' scales, in bfloat16, and have no zeros.  PyTorch 2.8 has no 8-bit product for
few rows on a GPU; the planes read one byte a weight, half of 16 bits, in two launches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flowspec_edge.stage.quant.base import DEFAULT_GROUP, Kind, QuantLinear, Scheme, require_finite
from flowspec_edge.stage.quant.grouped import GroupedScheme, pack

_PLANE = 16  # the weight of the high plane
_MOST = 7 * _PLANE + 7  # of |q|, so that both planes stay within -8..7
_CODES = ("packed", "qweight")  # what differs between the planes' modules


class Int8Scheme(Scheme):
    """``group``: as for int4."""

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
