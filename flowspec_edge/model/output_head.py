"""The target's lm_head as a module, in one or several blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowspec_edge.util.linears import product


class RowBlock(Protocol):
    """A linear module without bias: [n, H] to [n, out_features]."""

    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class RowLookUp(Protocol):
    """A matrix in a layout of its own.  ``looks_up_rows``: whether :meth:`logits_at` reads no more than rows."""

    looks_up_rows: bool

    def logits_at(self, x: Tensor, ids: Tensor) -> Tensor:
        """Products of each row of ``x`` [n, H] with its own rows ``ids`` [n, k] of the matrix: [n, k]."""


@runtime_checkable
class OpaqueRows(Protocol):
    """Rows whose packed weights are neither parameters nor buffers."""

    packed_bytes: int


_ROW_STEP = 16


class OutputHead(nn.Module):
    """Hidden states [..., H] to logits [..., V], in ``dtype`` on ``device``.

    On CUDA the rows are padded to a multiple of 16: cuBLAS chooses kernels by the number of rows, and one row
    of plain decoding should get the very logits that it gets among those of a tree, or of other requests.
    """

    def __init__(self, blocks: Sequence[RowBlock], hidden_size: int, dtype: torch.dtype, device: torch.device
                 ) -> None:
        """Join ``blocks``, modules whose rows follow one another."""
        super().__init__()
        self.blocks = nn.ModuleList(cast(Sequence[nn.Module], blocks))
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self._sizes = [block.out_features for block in blocks]
        self.vocabulary = sum(self._sizes)
        self._padding = (torch.zeros(_ROW_STEP - 1, hidden_size, dtype=dtype, device=device)
                         if torch.device(device).type == "cuda" else None)

    @property
    def nbytes(self) -> int:
        packed = sum(block.packed_bytes for block in self.blocks if isinstance(block, OpaqueRows))
        return packed + sum(t.numel() * t.element_size() for t in (*self.parameters(), *self.buffers()))

    def forward(self, states: Tensor) -> Tensor:
        flat = states.flatten(0, -2)
        rows = len(flat)
        if self._padding is not None and rows % _ROW_STEP:
            flat = torch.cat((flat, self._padding[: -rows % _ROW_STEP]))
        parts = [block(flat) for block in self.blocks]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return logits[:rows].view(*states.shape[:-1], self.vocabulary)

    @property
    def looks_up_rows(self) -> bool:
        """Whether :meth:`logits_at` reads no more than the tokens' rows."""
        return all(block.looks_up_rows if isinstance(block, RowLookUp) else _has_rows(block) for block in self.blocks)

    def logits_at(self, states: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of each state's own tokens ``ids`` [n, k], for states [n, H]: [n, k]."""
        parts, lo = [], 0
        for block, size in zip(self.blocks, self._sizes, strict=True):
            parts.append(_logits_at(block, states, (ids - lo).clamp(0, size - 1)))
            lo += size
        logits, lo = parts[0], self._sizes[0]
        for part, size in zip(parts[1:], self._sizes[1:], strict=True):
            logits = torch.where(ids >= lo, part, logits)  # no count of tokens leaves the device
            lo += size
        return logits

    def restrict_to(self, ids: Tensor) -> nn.Module:
        """Return the logits of the tokens ``ids`` [n] alone: [..., H] to [..., n].

        It holds copies of their rows, or computes all logits if this matrix is quantised.
        """
        ids = ids.to(self.device)
        if not all(isinstance(block, MatrixRows) for block in self.blocks):
            return _RestrictedHead(self, ids)
        weight = torch.empty((len(ids), self.hidden_size), dtype=self.dtype, device=self.device)
        lo = 0
        for block in cast(Sequence[MatrixRows], self.blocks):
            at = ((ids >= lo) & (ids < lo + block.out_features)).nonzero().flatten()
            weight[at] = block.weight[ids[at] - lo]
            lo += block.out_features
        return as_output_head(weight)


def _has_rows(block: nn.Module) -> bool:
    return isinstance(getattr(block, "weight", None), Tensor)


def _logits_at(block: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    if isinstance(block, RowLookUp):
        return block.logits_at(x, ids)
    if _has_rows(block):
        rows = functional.embedding(ids, cast(Tensor, block.weight))
        return torch.matmul(rows, x[..., None]).squeeze(-1)
    return cast(Tensor, block(x)).gather(-1, ids)


class _RestrictedHead(nn.Module):
    def __init__(self, head: OutputHead, ids: Tensor) -> None:
        super().__init__()
        self._head, self._ids = [head], ids  # not a part of this module, which may be moved or counted

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self._head[0](states)
        return logits.index_select(-1, self._ids)


class MatrixRows(nn.Module):
    """Rows of a matrix ``weight`` [n, H], as it is; ``nn.Linear`` would allocate its own first."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.out_features = len(weight)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


def as_output_head(weight: Tensor | OutputHead) -> OutputHead:
    """Return an output head; a matrix ``weight`` [V, H] is not copied."""
    if isinstance(weight, OutputHead):
        return weight
    return OutputHead([MatrixRows(weight)], weight.shape[1], weight.dtype, weight.device)
