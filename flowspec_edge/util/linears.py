"""Linear layers that read the same rows as one product: fewer kernel launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@runtime_checkable
class PackedLinear(Protocol):
    """A linear layer whose weights are packed in 4 or 8 bits."""

    def joined(self, others: Sequence[Any]) -> nn.Module | None:
        """One module with the rows of this and ``others``; None if the packing forbids it."""


_ROWS = 16


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear`` of x [..., k]; on a CPU in bfloat16 with the bits that a row has beside any others.

    PyTorch's and oneDNN's kernels there add in an order that depends on the number of rows, so that number is
    padded.  CPUs with units for bfloat16 take no longer for 16 rows than for one.
    """
    n = x.shape[:-1].numel()
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or n % _ROWS == 0:
        return F.linear(x, weight, bias)
    rows = F.pad(x.reshape(n, -1), (0, 0, 0, -n % _ROWS))
    return F.linear(rows, weight, bias)[:n].view(*x.shape[:-1], -1)


class PaddedLinear(nn.Module):
    """:func:`product` with a linear's weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def replace_linears(module: nn.Module, made_of: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the linears of ``module`` one by one, which frees what ``made_of`` does not keep."""
    for path in [path for path, part in module.named_modules() if type(part) is nn.Linear]:
        parent, _, child = path.rpartition(".")
        setattr(module.get_submodule(parent), child, made_of(cast(nn.Linear, module.get_submodule(path))))


def detach_and_join(parent: nn.Module, *names: str) -> nn.Module:
    """:func:`join` of ``parent``'s linears, which it loses, so that no weights are held twice."""
    parts = [parent.get_submodule(name) for name in names]
    for name in names:
        delattr(parent, name)
    return join(parts)


def join(parts: Sequence[nn.Module]) -> nn.Module:
    """Return a module that concatenates the linears' outputs; one product if all have the same storage format."""
    if all(type(part) is nn.Linear for part in parts):
        return _joined(cast("Sequence[nn.Linear]", parts))
    first, *others = parts
    if isinstance(first, PackedLinear) and all(isinstance(part, PackedLinear) for part in others):
        joined_linear = first.joined(others)
        if joined_linear is not None:
            return joined_linear
    return _Concatenated(parts)


def concatenated(parts: Sequence[nn.Module]) -> nn.Module:
    """Return a module that concatenates the linears' outputs, each of its own product."""
    return _Concatenated(parts)


def add_product(rows: Tensor, linear: nn.Module, x: Tensor) -> Tensor:
    """Add ``linear(x)`` to ``rows`` [n, out] in place; product and sum are one kernel if possible.

    On a CPU in 16 bits they are two, and the product is rounded, as in plain decoding.
    """
    has_bias = getattr(linear, "bias", None) is not None
    rounds_once = rows.dtype == torch.float32 or rows.device.type != "cpu"
    if type(linear) is nn.Linear and not has_bias and rounds_once:
        return rows.addmm_(x, linear.weight.t())
    return rows.add_(linear(x))


def _joined(parts: Sequence[nn.Linear]) -> nn.Module:
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)):
        return _Concatenated(parts)
    weights = [part.weight for part in parts]
    if not weights[0].is_contiguous() and weights[0].t().is_contiguous():  # the layout stays
        weight = torch.cat([weight.t() for weight in weights], 1).t()
    else:
        weight = torch.cat(weights)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        linear.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return linear


class _Concatenated(nn.Module):
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
