"""The layout of a pass's rows over ranks: Megatron-LM (arXiv 1909.08053) and Galaxy (INFOCOM 2024).

Each rank holds a slice of every block (attention or MLP): ``project_in`` projects rows to the slice,
``compute`` works on the slice for all rows, ``project_out`` gives the rank's share of the block's sum.  The
layouts differ in the rows a rank holds between two blocks (Galaxy's connective block), where norms and
residual adds are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.stage.tensor_parallel.process_group import ProcessGroup

TensorKind = Literal["megatron", "galaxy"]
Rows = Callable[[Tensor], Tensor]


class ParallelLayout(Protocol):
    """One pass at a time: ``split``, any number of ``block``, ``join``."""

    def split(self, x: Tensor) -> Tensor:
        """The rows of ``x`` [n, H] that this rank holds between blocks: [m, H]."""

    def block(self, x: Tensor, project_in: Rows, compute: Rows, project_out: Rows) -> Tensor:
        """The sum over all ranks of project_out(compute(project_in(all rows))), for the local rows: [m, H].

        ``project_in`` and ``project_out`` treat each row by itself; ``compute`` gets all n rows, in order.
        """

    def join(self, x: Tensor) -> Tensor:
        """All rows [n, H], on every rank."""


class MegatronLayout:
    """Every rank holds all rows; an all-reduce ends each block."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def split(self, x: Tensor) -> Tensor:
        return x

    def block(self, x: Tensor, project_in: Rows, compute: Rows, project_out: Rows) -> Tensor:
        return self._group.all_reduce(project_out(compute(project_in(x))))

    def join(self, x: Tensor) -> Tensor:
        return x


class GalaxyLayout:
    """Rank r holds the r-th of ``size`` equal tiles of rows, the last ones padded with zeros.

    Each ring step overlaps with the matrix product of the current tile.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._rows = 0  # n of the pass

    def split(self, x: Tensor) -> Tensor:
        self._rows = len(x)
        return self._tiles(x)[self._group.rank]

    def block(self, x: Tensor, project_in: Rows, compute: Rows, project_out: Rows) -> Tensor:
        return self._scatter(compute(self._gather(x, project_in)), project_out)

    def join(self, x: Tensor) -> Tensor:
        return self._gather(x, lambda tile: tile)

    def _tiles(self, x: Tensor) -> tuple[Tensor, ...]:
        size = self._group.size
        tile = -(-len(x) // size)
        return F.pad(x, (0, 0, 0, tile * size - len(x))).split(tile)

    def _gather(self, tile: Tensor, work: Rows) -> Tensor:
        """Ring all-gather: runs ``work`` on each rank's tile while the next tile is in transit."""
        rank, size = self._group.rank, self._group.size
        done: dict[int, Tensor] = {}
        for step in range(size - 1):
            shift = self._group.shift(tile)
            done[(rank - step) % size] = work(tile)
            tile = shift.wait()
        done[(rank + 1) % size] = work(tile)
        return torch.cat([done[i] for i in range(size)])[: self._rows]

    def _scatter(self, x: Tensor, work: Rows) -> Tensor:
        """Ring reduce-scatter: a tile's sum starts one rank after its owner and ends at the owner.

        ``work`` computes this rank's share of a tile while the other ranks' sum is in transit.
        """
        rank, size, tiles = self._group.rank, self._group.size, self._tiles(x)
        total = work(tiles[(rank - 1) % size])
        for step in range(1, size):
            shift = self._group.shift(total)
            share = work(tiles[(rank - 1 - step) % size])
            total = share + shift.wait()
        return total


def make_layout(kind: TensorKind, group: ProcessGroup) -> ParallelLayout:
    return MegatronLayout(group) if kind == "megatron" else GalaxyLayout(group)


class SplitEmbedding(nn.Module):
    def __init__(self, embed: nn.Module, layout: ParallelLayout) -> None:
        super().__init__()
        self.embed = embed
        self._layout = layout

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [n] to the local rows [m, H]."""
        return self._layout.split(self.embed(ids))


class JoinedNorm(nn.Module):
    def __init__(self, norm: nn.Module, layout: ParallelLayout) -> None:
        super().__init__()
        self.norm = norm
        self._layout = layout

    def forward(self, x: Tensor) -> Tensor:
        """Local rows [m, H] to all rows [n, H]."""
        return self._layout.join(self.norm(x))
