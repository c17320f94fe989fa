"""The interfaces of 4- and 8-bit weights: ``Scheme`` stores and quantises, ``QuantLinear`` multiplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, UsageError

LayerKind = Literal["int4", "nf4", "fp4"]
Kind = Literal["int4", "nf4", "fp4", "int8"]
KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
# Slices of rows start at multiples of this, since kernels pack blocks of 16, 32 or 64 rows on CPUs and
# of 8 on GPUs.
ROW_BLOCK = 64
_SLICE_WEIGHTS = 1 << 20  # unpacked at a time: 4 MB in 32 bits


class StoredTensors(Protocol):
    """Tensors of a checkpoint by name."""

    def __contains__(self, name: object) -> bool: ...

    def tensors(self, names: list[str]) -> dict[str, Tensor]: ...


class QuantLinear(nn.Module, ABC):
    """y = x Wᵀ + b with W [out_features, in_features] in 4 or 8 bits; replaces ``nn.Linear``.

    The packed weights are buffers outside ``state_dict``, in the kernel's layout (files hold
    ``Scheme.stored``), undefined before ``fill``, for one device and dtype.  ``forward`` takes
    [..., in_features] with any number of rows including none.
    """

    bias: Tensor | None
    row_dims: ClassVar[Mapping[str, int]] = {}  # buffer -> dimension of the rows, if not 0
    looks_up_rows: bool = False  # whether ``logits_at`` reads no more than rows

    def __init__(self, scheme: Scheme, rows: int, columns: int, bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        self.scheme = scheme
        self.out_features, self.in_features, self.dtype = rows, columns, dtype
        self.group = scheme.group_of(rows, columns)
        self.register_packed("bias", torch.empty(rows, dtype=dtype, device=device) if bias else None)
        self.allocate(device)

    def allocate(self, device: torch.device) -> None:
        """Make the buffers of the packed weights; by default those of ``Scheme.stored``."""
        for name, (shape, dtype) in self.scheme.stored(self.out_features, self.in_features).items():
            self.register_packed(name, torch.empty(shape, dtype=dtype, device=device))

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    @torch.no_grad()
    def fill(self, stored: Mapping[str, Tensor], bias: Tensor | None = None, first: int = 0,
             rows: int | None = None) -> None:
        """Pack ``stored`` and ``bias``, a slice of rows at a time.

        They have ``rows`` rows (None: all) from ``first`` on, a multiple of ``ROW_BLOCK``.

        FlowspecError unless names, shapes and dtypes are those of ``Scheme.stored`` and a bias is given
        exactly if the module has one.
        """
        rows = self.out_features if rows is None else rows
        self._check(stored, bias, rows)
        for lo, hi in slices(rows, self.in_features):
            self.fill_rows(first + lo, {name: tensor[lo:hi] for name, tensor in stored.items()})
        if self.bias is not None and bias is not None:
            self.bias[first : first + rows].copy_(bias)

    @torch.no_grad()
    def joined(self, others: Sequence[QuantLinear]) -> QuantLinear | None:
        """One module with the rows of this and ``others``; None if the kernel's layout forbids it."""
        parts = (self, *others)
        first, rows = next(self.buffers()), sum(part.out_features for part in parts)
        if (not self.scheme.joins([part.out_features for part in parts], self.in_features)
                or len({(part.scheme, part.in_features, part.bias is None) for part in parts}) > 1):
            return None
        joined_linear = self.scheme.linear(rows, self.in_features, self.bias is not None, self.dtype, first.device)
        for name, buffer in joined_linear.named_buffers():
            owner, _, buffer_name = name.rpartition(".")  # int8's are those of two planes
            rows_in = getattr(joined_linear.get_submodule(owner), "row_dims", {}).get(buffer_name, 0)
            torch.cat([part.get_buffer(name) for part in parts], rows_in, out=buffer)
        return joined_linear

    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        """Pack rows from ``lo`` on; ``lo`` and all slices but the last are multiples of ``ROW_BLOCK``."""
        for name, tensor in stored.items():
            self.get_buffer(name)[lo:lo + len(tensor)].copy_(tensor)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    def logits_at(self, x: Tensor, ids: Tensor) -> Tensor:
        """Products of each row of ``x`` [n, in_features] with its own rows ``ids`` [n, k] of W: [n, k]."""
        products: Tensor = self(x)
        return products.gather(-1, ids)

    def register_packed(self, name: str, value: Tensor | None) -> None:
        """Register a buffer that is not saved."""
        self.register_buffer(name, value, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Do nothing: the packing fits one device and dtype, and casting would change the scales."""
        return self

    def extra_repr(self) -> str:
        return (f"{self.scheme.kind}, in_features={self.in_features}, out_features={self.out_features}, "
                f"bias={self.bias is not None}")

    def _check(self, stored: Mapping[str, Tensor], bias: Tensor | None, rows: int) -> None:
        matrix = f"a {self.scheme.kind} matrix of {rows} x {self.in_features}"
        expected = self.scheme.stored(rows, self.in_features)
        if stored.keys() != expected.keys():
            raise FlowspecError(f"{matrix} is stored as {', '.join(expected)}, not as {', '.join(stored)}")
        for name, (shape, dtype) in expected.items():
            tensor = stored[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise FlowspecError(f"{name} of {matrix} must be {dtype} {list(shape)}, "
                                    f"and is {tensor.dtype} {list(tensor.shape)}")
        if (bias is None) != (self.bias is None):
            raise FlowspecError(f"{matrix} must {'not ' if self.bias is None else ''}have a bias")
        if bias is not None and bias.shape != (rows,):
            raise FlowspecError(f"the bias of {matrix} has shape {list(bias.shape)}")


class Scheme(ABC):
    """One way to store matrices in 4 or 8 bits.  Row i of a stored tensor belongs to row i of the matrix."""

    kind: Kind

    @abstractmethod
    def fits(self, rows: int, columns: int) -> int | None:
        """Return the group size for this shape; None if the matrix must stay in 16 bits."""

    @abstractmethod
    def stored(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Suffix -> (shape with ``rows`` first, dtype); UsageError for an unsupported shape."""

    @abstractmethod
    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the stored tensors of ``weight`` [n, columns] of any floating type, on its device.

        Rows are independent, so slices can be quantised one by one.  FlowspecError for values that are not
        finite.
        """

    @abstractmethod
    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        """[n, columns] float32."""

    @abstractmethod
    def linear(self, rows: int, columns: int, bias: bool, dtype: torch.dtype,
               device: torch.device | str = "cpu") -> QuantLinear:
        """Return an unfilled module; ``dtype`` is that of activations.

        UsageError for an unsupported shape.
        """

    def joins(self, parts: Sequence[int], columns: int) -> bool:
        """Return whether one matrix can hold several matrices, whose numbers of rows are ``parts``."""
        return not any(rows % ROW_BLOCK for rows in parts[:-1]) and self.fits(sum(parts), columns) is not None

    def caveat(self, dtype: torch.dtype, capability: tuple[int, int]) -> str:
        """One line of advice if ``dtype`` is slow on a GPU of that compute capability, else ""."""
        return ""

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a linear's weights in memory."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.stored(rows, columns).values())

    def group_of(self, rows: int, columns: int) -> int:
        """Return what ``fits`` returns, with a UsageError instead of None."""
        group = self.fits(rows, columns)
        if group is None:
            raise UsageError(f"{self.kind} cannot hold a matrix of {rows} x {columns}: keep it in 16 bits")
        return group


def slices(rows: int, columns: int, weights: int = _SLICE_WEIGHTS) -> Iterator[tuple[int, int]]:
    """Split rows into runs [lo, hi) of about ``weights`` weights; every lo is a multiple of ``ROW_BLOCK``."""
    step = max(1, weights // columns // ROW_BLOCK) * ROW_BLOCK
    for lo in range(0, rows, step):
        yield lo, min(lo + step, rows)


def require_finite(weight: Tensor) -> None:
    """Raise FlowspecError unless ``weight`` is finite: an infinite scale would ruin its group."""
    if not bool(torch.isfinite(weight).all()):
        raise FlowspecError("a weight is infinite or not a number: the checkpoint is damaged")
