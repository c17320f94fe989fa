"""Which scale and zero lose least: round to nearest in groups, with a search for where to clip.

Works on slices of a matrix in float32 and is exact about what will be stored: scale and zero are rounded
to bfloat16 before the codes are chosen.  Does not know kernels or files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError

LEVELS = 16
_MIDDLE = 8  # the code that stands for ``zero`` itself
# Shares of a group's least and of its greatest weight between which the levels lie at first.  Clipping the
# ends makes the steps finer; ends that are clipped alike only lose half of what there is to gain.
_ENDS = ((1.0, 1.0), (0.95, 0.9), (0.9, 0.95), (0.85, 0.75), (0.75, 0.85))
_REFITS = 3  # least squares and rounding in turn, once the best ends are known


def quantise_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and what they mean, for the least squared error found in every group.

    weight   [n, k] of any floating type; k a multiple of ``group``

    Returns codes, two a byte, the even column in the low half: uint8 [n, k / 2]; scales and zeros:
    bfloat16 [n, k / group]; w is about (code - 8) * scale + zero.

    For each of a few places of the ends the weights are rounded; the scale and zero that fit those codes
    best follow from linear regression of w on the codes, and so does their error.  The best ends win,
    rounding and regression are repeated, and the codes are chosen for what is stored.
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
    """Codes 0..15, uint8 [n, k], two a byte, the even column in the low half: uint8 [n, k / 2]."""
    return codes[:, 1::2].bitwise_left_shift(4).bitwise_or_(codes[:, ::2])


class _Fit:
    """The best scale and zero [m, 1] so far for groups ``w`` [m, g]."""

    def __init__(self, w: Tensor) -> None:
        self.w = w
        self.mean = w.mean(1, keepdim=True)
        # A group of equal weights: any scale will do, and the mean is right.
        self.scale, self.zero = torch.zeros_like(self.mean), self.mean.clone()
        self.gain = torch.zeros_like(self.mean)
        self._work = torch.empty_like(w)

    def codes(self, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest codes 0..15, [m, g], in memory that the next call reuses."""
        # As w * (1 / scale) + (8 - zero / scale): two passes; torch is several times slower at three in one.
        inverse = torch.where(scale > 0, 1 / scale, 0)
        offset = _MIDDLE - zero * inverse
        torch.mul(self.w, inverse, out=self._work)
        return self._work.add_(offset).round_().clamp_(0, LEVELS - 1)

    def consider(self, scale: Tensor, zero: Tensor) -> None:
        """Round with ``scale`` and ``zero``, fit both to the codes, and keep them where they are better.

        With q the codes, the squared error of the best line is var(w) - cov(q, w)² / var(q), all summed
        over the group: the larger the second term, which is the ``gain``, the better.
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
