"""How the ranks of a layer are connected: Megatron-LM's all-reduce, or Galaxy's split rows.

Both run a block (attention, or the MLP) of which every rank holds a slice: ``enter`` widens rows to
the rank's slice, ``core`` works on the slice for all rows at once, ``leave`` gives the rank's share
of the block's sum.  They differ in which rows a rank holds between two blocks, where norms and
residual adds are.  Knows rows and ranks.  Does not know what a block computes.

Megatron-LM is arXiv 1909.08053; Galaxy (INFOCOM 2024) calls the rows between two blocks the
connective block, and overlaps each step of its rings with the matrix product of the tile at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.stage.tensor_group import Group

TensorKind = Literal["megatron", "galaxy"]
Rows = Callable[[Tensor], Tensor]


class Connection(Protocol):
    """One pass at a time: :meth:`split`, any number of blocks, :meth:`join`."""

    def split(self, x: Tensor) -> Tensor:
        """The rows of ``x`` [n, H] that this rank holds between blocks: [m, H]."""

    def block(self, x: Tensor, enter: Rows, core: Rows, leave: Rows) -> Tensor:
        """The sum over all ranks of leave(core(enter(all rows))), for the rows held: [m, H].

        ``enter`` and ``leave`` treat each row by itself; ``core`` gets all n rows, in order.
        """

    def join(self, x: Tensor) -> Tensor:
        """All rows [n, H], on every rank, of what the ranks hold."""


class Megatron:
    """Every rank holds all rows; an all-reduce ends each block."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def split(self, x: Tensor) -> Tensor:
        """See :class:`Connection`."""
        return x

    def block(self, x: Tensor, enter: Rows, core: Rows, leave: Rows) -> Tensor:
        """See :class:`Connection`."""
        return self._group.all_reduce(leave(core(enter(x))))

    def join(self, x: Tensor) -> Tensor:
        """See :class:`Connection`."""
        return x


class Galaxy:
    """Rank r holds the r-th of as many equal tiles of rows; the last tiles are padded with zeros."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rows = 0  # n of the pass

    def split(self, x: Tensor) -> Tensor:
        """See :class:`Connection`."""
        self._rows = len(x)
        return self._tiles(x)[self._group.rank]

    def block(self, x: Tensor, enter: Rows, core: Rows, leave: Rows) -> Tensor:
        """See :class:`Connection`."""
        return self._scatter(core(self._gather(x, enter)), leave)

    def join(self, x: Tensor) -> Tensor:
        """See :class:`Connection`."""
        return self._gather(x, lambda tile: tile)

    def _tiles(self, x: Tensor) -> tuple[Tensor, ...]:
        size = self._group.size
        tile = -(-len(x) // size)
        return F.pad(x, (0, 0, 0, tile * size - len(x))).split(tile)

    def _gather(self, tile: Tensor, work: Rows) -> Tensor:
        """Ring all-gather: ``work`` on every rank's tile, while the next one is on its way."""
        rank, size = self._group.rank, self._group.size
        done: dict[int, Tensor] = {}
        for step in range(size - 1):
            shift = self._group.shift(tile)
            done[(rank - step) % size] = work(tile)
            tile = shift.wait()
        done[(rank + 1) % size] = work(tile)
        return torch.cat([done[i] for i in range(size)])[: self._rows]

    def _scatter(self, x: Tensor, work: Rows) -> Tensor:
        """Ring reduce-scatter: a tile's sum starts one rank after its owner and travels round to it.

        ``work`` gives this rank's share of a tile while the sum of the others' is on its way.
        """
        rank, size, tiles = self._group.rank, self._group.size, self._tiles(x)
        total = work(tiles[(rank - 1) % size])
        for step in range(1, size):
            shift = self._group.shift(total)
            share = work(tiles[(rank - 1 - step) % size])
            total = share + shift.wait()
        return total


def connect(kind: TensorKind, group: Group) -> Connection:
    """The connection that ``kind`` names."""
    return Megatron(group) if kind == "megatron" else Galaxy(group)


class Split(nn.Module):
    """Token embeddings, for the rows that the rank holds."""

    def __init__(self, embed: nn.Module, connection: Connection) -> None:
        super().__init__()
        self.embed = embed
        self._connection = connection

    def forward(self, ids: Tensor) -> Tensor:
        """ids [n] to [m, H]."""
        return self._connection.split(self.embed(ids))


class Joined(nn.Module):
    """The final norm, for the rows that the rank holds; then all rows."""

    def __init__(self, norm: nn.Module, connection: Connection) -> None:
        super().__init__()
        self.norm = norm
        self._connection = connection

    def forward(self, x: Tensor) -> Tensor:
        """[m, H] to [n, H]."""
        return self._connection.join(self.norm(x))
