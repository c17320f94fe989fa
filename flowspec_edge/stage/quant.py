"""4-bit weights: one interface for every way to store a matrix in 4 bits and to multiply by it.

A *scheme* says what is stored for a matrix, quantises any slice of its rows, and makes the module that
stands in for ``nn.Linear``.  Knows which schemes there are and what they have in common.  Does not know
files (``checkpoint``), nor which matrices of a model are quantised (whoever cuts the model decides).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, UsageError

Kind = Literal["int4", "nf4", "fp4"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_GROUP = 128
# Slices of rows start at multiples of this: the blocks of rows that kernels pack together, 16, 32 or 64
# on CPUs and 8 on GPUs, all divide it.
ROW_BLOCK = 64
_SLICE_WEIGHTS = 1 << 20  # held unpacked at a time: 4 MB in 32 bits


class QuantLinear(nn.Module, ABC):
    """y = x Wᵀ + b with W [out_features, in_features] held in 4 bits; stands in for ``nn.Linear``.

    The packed weights are buffers that ``state_dict`` leaves out: their layout is the kernel's own, and
    files hold ``Scheme.stored`` instead.  Until ``fill`` has been called they are undefined.

    Made for one device and dtype: it is neither moved nor cast with the model around it.  ``forward``
    takes [..., in_features] in ``dtype`` and returns [..., out_features] in ``dtype``; any number of rows,
    none too.
    """

    bias: Tensor | None
    row_dims: ClassVar[Mapping[str, int]] = {}  # of buffers whose rows are not their first dimension

    def __init__(self, scheme: Scheme, rows: int, columns: int, bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        self.scheme = scheme
        self.out_features, self.in_features, self.dtype = rows, columns, dtype
        self.keep("bias", torch.empty(rows, dtype=dtype, device=device) if bias else None)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, their scales and the bias."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    @torch.no_grad()
    def fill(self, stored: Mapping[str, Tensor], bias: Tensor | None = None) -> None:
        """Pack ``stored`` (as ``Scheme.stored`` says) and ``bias`` [rows], a slice of rows at a time.

        FlowspecError unless names, shapes and dtypes are those that ``Scheme.stored`` gives, and a bias
        is there exactly where the module has one.
        """
        self._check(stored, bias)
        for lo, hi in slices(self.out_features, self.in_features):
            self.fill_rows(lo, {name: tensor[lo:hi] for name, tensor in stored.items()})
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    @torch.no_grad()
    def joined(self, others: Sequence[QuantLinear]) -> QuantLinear | None:
        """One module with the rows of this and then of ``others``, which are filled; None where the kernel's
        layout does not allow it."""
        parts = (self, *others)
        first, rows = next(self.buffers()), sum(part.out_features for part in parts)
        if (any(part.out_features % ROW_BLOCK for part in parts[:-1])
                or self.scheme.fits(rows, self.in_features) is None
                or len({(part.scheme, part.in_features, part.bias is None) for part in parts}) > 1):
            return None
        whole = self.scheme.linear(rows, self.in_features, self.bias is not None, self.dtype, first.device)
        for name, buffer in whole.named_buffers():
            torch.cat([part.get_buffer(name) for part in parts], self.row_dims.get(name, 0), out=buffer)
        return whole

    @abstractmethod
    def fill_rows(self, lo: int, stored: Mapping[str, Tensor]) -> None:
        """Pack a slice: rows from ``lo`` on, a multiple of ``ROW_BLOCK``, and as is their number unless
        they are the last."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""

    def keep(self, name: str, value: Tensor | None) -> None:
        """Hold ``value`` as a buffer that is not saved."""
        self.register_buffer(name, value, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Nothing: what is packed belongs to the device and dtype that the module was made for, and a
        scale that is cast with a model's other tensors would be another scale."""
        return self

    def extra_repr(self) -> str:
        return (f"{self.scheme.kind}, in_features={self.in_features}, out_features={self.out_features}, "
                f"bias={self.bias is not None}")

    def _check(self, stored: Mapping[str, Tensor], bias: Tensor | None) -> None:
        what = f"a {self.scheme.kind} matrix of {self.out_features} x {self.in_features}"
        wanted = self.scheme.stored(self.out_features, self.in_features)
        if stored.keys() != wanted.keys():
            raise FlowspecError(f"{what} is stored as {', '.join(wanted)}, not as {', '.join(stored)}")
        for name, (shape, dtype) in wanted.items():
            found = stored[name]
            if tuple(found.shape) != shape or found.dtype != dtype:
                raise FlowspecError(f"{name} of {what} must be {dtype} {list(shape)}, "
                                    f"and is {found.dtype} {list(found.shape)}")
        if (bias is None) != (self.bias is None):
            raise FlowspecError(f"{what} must {'not ' if self.bias is None else ''}have a bias")
        if bias is not None and bias.shape != (self.out_features,):
            raise FlowspecError(f"the bias of {what} has shape {list(bias.shape)}")


class Scheme(ABC):
    """One way to store matrices in 4 bits.  Row i of everything stored belongs to row i of the matrix."""

    kind: Kind

    @abstractmethod
    def fits(self, rows: int, columns: int) -> int | None:
        """How many weights of a row share a scale in a matrix of this shape; None if no 4-bit product
        takes the shape, so that the matrix stays in 16 bits."""

    @abstractmethod
    def stored(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Suffix -> shape and dtype of what is stored for a matrix; the first dimension is ``rows``.

        UsageError for a shape that does not fit.
        """

    @abstractmethod
    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """What is stored for ``weight`` [n, columns] of any floating type, on its device.

        Rows are independent: what slices of rows give, concatenated, is what the whole gives.
        FlowspecError for values that are not finite.
        """

    @abstractmethod
    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The weights that ``stored`` stands for: [n, columns] float32."""

    @abstractmethod
    def linear(self, rows: int, columns: int, bias: bool, dtype: torch.dtype,
               device: torch.device | str = "cpu") -> QuantLinear:
        """A module for a matrix of this shape, to be filled.  ``dtype``: of activations and bias.

        UsageError for a shape that does not fit.
        """

    def caveat(self, dtype: torch.dtype, capability: tuple[int, int]) -> str:
        """What makes this scheme slow for activations of ``dtype`` on a GPU of that compute capability, and
        what to do about it: one line, or empty."""
        return ""

    def group_of(self, rows: int, columns: int) -> int:
        """``fits``, for a shape that must; UsageError otherwise."""
        group = self.fits(rows, columns)
        if group is None:
            raise UsageError(f"{self.kind} cannot hold a matrix of {rows} x {columns}: keep it in 16 bits")
        return group


def scheme(kind: Kind, group: int = DEFAULT_GROUP) -> Scheme:
    """The scheme called ``kind``.

    int4      PyTorch's grouped int4; ``group`` weights of a row share a scale and a zero: 32, 64, 128, 256
    nf4, fp4  bitsandbytes, in blocks of 64, whatever ``group`` is

    UsageError for an unknown kind or group, or where bitsandbytes is not installed.
    """
    # Here, not above: the modules build on this one, and bitsandbytes may not be installed.
    if kind == "int4":
        from flowspec_edge.stage.quant_grouped import GroupedScheme

        return GroupedScheme(group)
    if kind in KINDS:
        from flowspec_edge.stage.quant_bnb import BnbScheme

        return BnbScheme(kind)
    raise UsageError(f"no 4-bit kind {kind!r}: use one of {', '.join(KINDS)}")


def slices(rows: int, columns: int, weights: int = _SLICE_WEIGHTS) -> Iterator[tuple[int, int]]:
    """Cut the rows of a matrix into runs [lo, hi) of about ``weights`` weights, every lo a multiple of
    ``ROW_BLOCK``."""
    step = max(1, weights // columns // ROW_BLOCK) * ROW_BLOCK
    for lo in range(0, rows, step):
        yield lo, min(lo + step, rows)


def require_finite(weight: Tensor) -> None:
    """FlowspecError unless all of ``weight`` is finite: a scale of infinity would ruin its neighbours."""
    if not bool(torch.isfinite(weight).all()):
        raise FlowspecError("a weight is infinite or not a number: the checkpoint is damaged")
