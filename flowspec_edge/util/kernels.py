"""Parts of decoder layers in few kernel launches, for CUDA.

A launch costs a small board's CPU core 25 to 40 µs, so short work on its GPU is bound by their number
(docs/experiments/costs.md).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def fuses_rms_norm(device: torch.device) -> bool:
    """Whether ``F.rms_norm`` is one kernel: on CUDA from PyTorch 2.9 on.

    2.8, the newest for JetPack 6, composes it of eight.
    """
    return device.type != "cuda" or (
        hasattr(torch.ops.aten, "_fused_rms_norm")
        and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"))


class RmsNorm:
    """RMS norm by ``F.rms_norm`` in one launch, or in two where PyTorch composes it.

    The two: beside −x, the mean of x is 0, so that the layer norm of both divides x by its root mean square.
    It computes in float32 and rounds once, as the fused kernel does; the mean is 0 within the last bit of the
    row's largest value in float32.
    """

    def __init__(self, weight: Tensor, eps: float, fused: bool | None = None) -> None:
        """Take the weight [H], of the rows' dtype and device; ``fused``: None asks ``fuses_rms_norm``."""
        self._weight, self._eps = weight, eps
        fused = fuses_rms_norm(weight.device) if fused is None else fused
        self._signs = None if fused else signs(weight)
        self._both = None if fused else torch.cat([weight, weight])

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x [..., H] to [..., H], not always contiguous."""
        if self._signs is None:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        return _halved(x, self._signs, self._both, self._eps)


class HeadNorms:
    """RMS norms of several heads, each with its own weight, in three launches."""

    def __init__(self, weights: Tensor, eps: float) -> None:
        """Take weights [heads, head_dim]."""
        self._weights, self._eps, self._signs = weights, eps, signs(weights)

    def in_place(self, x: Tensor) -> None:
        """Norm x [N, heads, head_dim] in its place; it may be a view."""
        torch.mul(_halved(x, self._signs, None, self._eps), self._weights, out=x)


def signs(like: Tensor) -> Tensor:
    """[2, 1]: 1 and −1."""
    return torch.tensor([[1.0], [-1.0]], dtype=like.dtype, device=like.device)


def _halved(x: Tensor, plus_minus: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the first half of the layer norm of [x, −x]."""
    width = x.shape[-1]
    both = (x[..., None, :] * plus_minus).flatten(-2)
    return F.layer_norm(both, (2 * width,), weight, None, eps)[..., :width]


def rotate_in_place(x: Tensor, by: tuple[Tensor, Tensor]) -> None:
    """Rotate x [N, heads, d]: its halves (a, b) become (a cos - b sin, b cos + a sin); three launches.

    ``by``: cosines and sines [N, 1, d], the sines of the first half negated.
    """
    cos, signed_sin = by
    if x.device.type == "cpu" and x.dtype != torch.float32:  # both products rounded, as plain decoding does there
        x.copy_(x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin)
        return
    low, high = x.chunk(2, dim=-1)
    swapped = torch.cat((high, low), dim=-1)  # on CUDA roll() first copies what is not contiguous
    x.mul_(cos).addcmul_(swapped, signed_sin)
