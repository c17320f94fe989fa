"""Root mean square norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.util.kernels import HeadNorms, RmsNorm


class Norm(nn.Module):
    """A norm of rows; call :meth:`prepare` once the weight is loaded."""

    _kernel: RmsNorm

    def __init__(self, width: int, eps: float, centred: bool = False) -> None:
        """Set up a norm; ``centred``: the weight is its difference from 1, and rows are normed in float32."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if centred else torch.ones(width), requires_grad=False)
        self.eps, self.centred = eps, centred

    @property
    def factors(self) -> Tensor:
        """The factors by which normed values are multiplied."""
        return 1.0 + self.weight.float() if self.centred else self.weight.detach()

    def prepare(self) -> None:
        self._kernel = RmsNorm(self.factors, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape and dtype."""
        if self.centred:
            return self._kernel(x.float()).to(x.dtype)
        if x.dtype != torch.float32 and x.device.type == "cpu":  # rounded twice, as plain decoding is there
            return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight
        return self._kernel(x)


def head_norms(*norms: tuple[Norm, int]) -> HeadNorms:
    """Join norms of heads, each with the number of its heads, which are side by side."""
    return HeadNorms(torch.cat([norm.factors.expand(heads, -1) for norm, heads in norms]), norms[0][0].eps)
