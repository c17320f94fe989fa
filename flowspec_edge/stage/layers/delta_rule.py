"""The gated delta rule over a draft tree (Qwen3-Next and its successors), as pure functions of tensors.

A layer's state S [k, v] after the text replaces keys and values.  The text is divided into blocks of B rows.  A row's
block is what its path, from the text's beginning to the row itself, has of the last B rows or fewer that are not a
whole block.  With S the state before the row's block, i the rows of the block up to t, and G(t) the product of their
decays:

    w(t) = beta(t) (v(t) - G(t) S^T k(t))
    u(t) = w(t) - beta(t) sum over earlier j in the block of G(t)/G(j) (k(t) k(j)) u(j)
    o(t) = G(t) S^T q(t) + sum over j up to t in the block of G(t)/G(j) (q(t) k(j)) u(j)

and the state after a whole block is G(B) S + sum over its j of G(B)/G(j) k(j) u(j)^T.  On a chain this is the
recurrence itself in the chunked form of https://arxiv.org/abs/2412.06464, with chunks of B rows.

A row's result depends on its path alone, bit for bit: blocks begin at multiples of B, whatever was committed when, and
every product has the shape of a whole block, whatever else is computed with it.  A row that is not folded into the
layer's state is an entry (k, w, beta, log decay); the state behind a block of uncommitted rows is computed where a
row needs it.

Shapes: queries and keys [n, key heads, k]; values, w and u [n, heads, v], where each key head serves
``heads / key heads`` neighbouring heads; betas, log decays and their sums [n, heads]; S [heads, k, v].
Everything is in one dtype: float32, unless a test wants more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.util.elementwise import silu
from flowspec_edge.util.tensors import indices

FOLDED = -1  # the key of the layer's own state; a block's state has the column of the block's last row as its key


class DeltaRows(NamedTuple):
    """What n rows bring; queries divided by sqrt(k), queries and keys normalised."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decays: Tensor  # at most 0
    betas: Tensor


class Entries(NamedTuple):
    """Of rows that are not folded into the state, parents first."""

    keys: Tensor
    targets: Tensor  # w
    log_decays: Tensor
    betas: Tensor


class Fold(NamedTuple):
    """The state with ``key`` follows the one with ``before`` by the block ``block``."""

    key: int
    before: int
    block: int


@dataclass(frozen=True, eq=False)
class Step:
    """Blocks of a pass that begin at one place of the text, after the steps before it.

    folds   what is to be computed before: states behind blocks of earlier steps
    tiles   a state's key each: the products with this state take up to B rows
    rows    [tiles * B] int64: the rows of the pass in the tiles, the last one repeated
    tiled   [r] int64: where in the tiles the step's r rows are
    columns  [r] int64: the columns of these rows
    places  [r] int64: where they are in the blocks, as ``block * B + place``
    bags    [r, B] int64: the columns of their blocks
    """

    folds: tuple[Fold, ...]
    tiles: tuple[int, ...]
    rows: Tensor
    tiled: Tensor
    columns: Tensor
    places: Tensor
    bags: Tensor


@dataclass(frozen=True, eq=False)
class DeltaPlan:
    """How the n rows of a pass are computed, of which m + n columns are entries afterwards.

    columns  [blocks, B] int64: of each block, the oldest first, the last one repeated
    rows     [blocks, B] int64: the pass's rows at these columns; 0 where there is none
    outputs  [n] int64: where each row is in the results of all steps
    ahead    the key of the state that the layer keeps beside its own: FOLDED for none
    """

    columns: Tensor
    rows: Tensor
    outputs: Tensor
    steps: tuple[Step, ...]
    ahead: int


class _Block(NamedTuple):
    step: int
    columns: list[int]


def make_plan(seen: NDArray[np.bool_], block: int, ahead: int, device: torch.device) -> DeltaPlan:
    """Plan a pass.

    seen   [n, m + n]: what each row sees of m entries, which begin with a block, and of the rows; itself, its
           ancestors and nothing else, parents before children
    ahead  the key of the state that is at hand beside the layer's own
    """
    n, m = len(seen), seen.shape[1] - len(seen)
    paths = [np.flatnonzero(row).tolist() for row in seen]
    begins = [(len(path) - 1) // block for path in paths]  # the step of each row
    states = [path[step * block - 1] if step else FOLDED for path, step in zip(paths, begins, strict=True)]
    blocks: list[_Block] = []
    where: dict[int, tuple[int, int]] = {}
    for row in reversed(range(n)):
        if m + row not in where:
            _add_block(blocks, where, paths[row], block)
    folds = _folds(paths, states, blocks, where, block, ahead)
    filled = [_padded(it.columns, block) for it in blocks]
    steps: list[tuple[tuple[Fold, ...], tuple[int, ...]]] = []
    arrays: list[list[int]] = []
    sequence: list[int] = []  # all rows, step by step
    for number in sorted({it.step for it in blocks}):
        rows = sorted((row for row in range(n) if begins[row] == number), key=lambda row: (states[row], row))
        sequence += rows
        keys, tiles, tiled = _tiles(rows, states, block)
        at = [where[m + row] for row in rows]
        steps.append((tuple(fold for fold in folds if blocks[fold.block].step == number - 1), keys))
        arrays += [tiles, tiled, [m + row for row in rows], [index * block + place for index, place in at],
                   [column for index, _ in at for column in filled[index]]]
    columns = [column for one in filled for column in one]
    arrays += [columns, [max(0, column - m) for column in columns], np.argsort(sequence).tolist()]
    tensors = iter(_uploaded(arrays, device))
    made = tuple(Step(*parts, next(tensors), next(tensors), next(tensors), next(tensors),
                      next(tensors).view(-1, block)) for parts in steps)
    return DeltaPlan(next(tensors).view(-1, block), next(tensors).view(-1, block), next(tensors), made,
                     _next_ahead(states, paths, block, ahead))


def _add_block(blocks: list[_Block], where: dict[int, tuple[int, int]], path: Sequence[int], block: int) -> None:
    """Add the block in which ``path`` ends.

    where  by column: the index of a block with it, and its place there
    """
    step = (len(path) - 1) // block
    columns = list(path[step * block :])
    for place, column in enumerate(columns):
        where.setdefault(column, (len(blocks), place))
    blocks.append(_Block(step, columns))


def _folds(paths: Sequence[list[int]], states: Sequence[int], blocks: list[_Block],
           where: dict[int, tuple[int, int]], block: int, ahead: int) -> list[Fold]:
    """Return how to compute the states before the rows with ``paths``; may add blocks."""
    folds: dict[int, Fold] = {}
    for path, state in zip(paths, states, strict=True):
        key, step = state, (len(path) - 1) // block
        while key not in (FOLDED, ahead) and key not in folds:
            if key not in where:
                _add_block(blocks, where, path[: step * block], block)
            step -= 1
            before = path[step * block - 1] if step else FOLDED
            folds[key] = Fold(key, before, where[key][0])
            key = before
    return list(folds.values())


def _tiles(rows: Sequence[int], states: Sequence[int], block: int
           ) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Return the tiles of ``rows``, which are ordered by state: their keys, rows, and where each row is."""
    keys: list[int] = []
    tiles: list[list[int]] = []
    tiled = []
    for row in rows:
        if not keys or keys[-1] != states[row] or len(tiles[-1]) == block:
            keys.append(states[row])
            tiles.append([])
        tiled.append((len(tiles) - 1) * block + len(tiles[-1]))
        tiles[-1].append(row)
    return tuple(keys), [row for tile in tiles for row in _padded(tile, block)], tiled


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[values[-1]] * (length - len(values))]


def _next_ahead(states: Sequence[int], paths: Sequence[Sequence[int]], block: int, ahead: int) -> int:
    """Return the key of the state that most of the rows farthest on need: the next pass is likely to need it."""
    needed = {key: ((len(path) - 1) // block, states.count(key)) for path, key in zip(paths, states, strict=True)
              if key != FOLDED}
    return max(needed, key=needed.__getitem__, default=ahead)


def _uploaded(arrays: Sequence[Sequence[int]], device: torch.device) -> Sequence[Tensor]:
    """Return ``arrays`` as int64 tensors that one copy brings to ``device``."""
    return indices([value for array in arrays for value in array], device).split([len(array) for array in arrays])


def segment(rows: DeltaRows, states: Mapping[int, Tensor], entries: Entries, plan: DeltaPlan
            ) -> tuple[Tensor, Tensor | None]:
    """Compute the outputs [n, heads, v] of ``rows``, which become the last n of ``entries`` [m + n].

    states  [heads, k, v] each, by key: the layer's own, and the one that ``make_plan`` was told of
    Returns the outputs, and the state with the plan's key ``ahead``, None if that is FOLDED.
    """
    start = len(entries.keys) - len(rows.keys)
    for tensor, new in zip((entries.keys, entries.log_decays, entries.betas),
                           (rows.keys, rows.log_decays, rows.betas), strict=True):
        tensor[start:] = new
    blocks = _blocks(entries, plan.columns)
    weights = blocks.weights(rows.queries[plan.rows])
    both = torch.stack((rows.keys, rows.queries), 1)  # [n, 2, key heads, k]
    at_hand, outputs, ahead = dict(states), [], None
    for step in plan.steps:
        for key, before, block in step.folds:
            at_hand[key] = blocks.fold(at_hand[before], block, entries.targets[plan.columns[block]])
        ahead = at_hand.get(plan.ahead, ahead)
        if step.tiles:
            gates = blocks.gates.transpose(1, 2).flatten(0, 1)[step.places].exp()
            remembered = _remembered(both, at_hand, step) * gates[:, None, :, None]
            index = step.columns - start
            entries.targets[step.columns] = (rows.values[index] - remembered[:, 0]) * rows.betas[index][..., None]
            outputs.append(remembered[:, 1] + _summed(weights.transpose(1, 2).flatten(0, 1)[step.places],
                                                      entries.targets, step.bags))
        at_hand = {key: state for key, state in at_hand.items() if key in (*states, *step.tiles)}
    return torch.cat(outputs)[plan.outputs], None if plan.ahead == FOLDED else ahead


def _summed(weights: Tensor, targets: Tensor, columns: Tensor) -> Tensor:
    """Return the sums of ``targets`` [m + n, heads, v] in the columns [r, B], one after the other, with weights
    [r, heads, B]: [r, heads, v].  Nothing is gathered in memory."""
    r, heads, size = weights.shape
    index = columns[:, None] * heads + torch.arange(heads, device=columns.device)[:, None]
    return F.embedding_bag(index.view(-1, size), targets.flatten(0, 1), mode="sum",
                           per_sample_weights=weights.reshape(-1, size)).view(r, heads, -1)


def _remembered(both: Tensor, states: Mapping[int, Tensor], step: Step) -> Tensor:
    """Return the products of the step's r rows' keys and queries with their states: [r, 2, heads, v].

    both  [n, 2, key heads, k]: of all rows of the pass
    """
    tiles = both[step.rows].unflatten(0, (len(step.tiles), -1)).permute(0, 3, 2, 1, 4).flatten(2, 3)
    products = []
    for tile, key in zip(tiles, step.tiles, strict=True):  # [key heads, 2B, k]
        grouped = states[key].unflatten(0, (len(tile), -1))  # [key heads, group, k, v]
        products.append((tile[:, None] @ grouped).flatten(0, 1).unflatten(1, (2, -1)))
    return torch.stack(products).permute(0, 3, 2, 1, 4).flatten(0, 1)[step.tiled]


class _Blocks(NamedTuple):
    """keys    [b, key heads, B, k]
    gates   [b, heads, B]: log G
    ratios  [b, heads, B, B]: G(t)/G(j) on and below the diagonal, 0 above
    betas   [b, heads, B, 1]
    """

    keys: Tensor
    gates: Tensor
    ratios: Tensor
    betas: Tensor

    def weights(self, queries: Tensor) -> Tensor:
        """Return how much each target of a block adds to the block's outputs [b, heads, B, B].

        queries  [b, B, key heads, k]; those that belong to no row of the pass may be any
        """
        both = torch.cat((self.keys, queries.transpose(1, 2)), 2)
        products = self._times_keys(both).unflatten(3, (2, -1))  # [b, key heads, 1, 2, B, B]
        scaled = products * self.ratios.unflatten(1, (self.keys.shape[1], -1))[:, :, :, None]
        coupled, outputs = scaled.flatten(1, 2).unbind(2)  # [b, heads, B, B] each
        # The diagonal of the system is not read.
        return torch.linalg.solve_triangular((self.betas * coupled).flatten(0, 1), outputs.flatten(0, 1), upper=False,
                                             left=False, unitriangular=True).unflatten(0, outputs.shape[:2])

    def _times_keys(self, rows: Tensor) -> Tensor:
        """Return the products of rows [b, key heads, r, k] with the blocks' keys: [b, key heads, 1, r, B]."""
        return (rows.flatten(0, 1) @ self.keys.flatten(0, 1).mT).unflatten(0, self.keys.shape[:2])[:, :, None]

    def fold(self, state: Tensor, block: int, targets: Tensor) -> Tensor:
        """Return the state after the whole block ``block``, whose entries have ``targets`` [B, heads, v]."""
        one = _Blocks(*(tensor[block : block + 1] for tensor in self))
        products = one._times_keys(one.keys) * one.ratios.unflatten(1, (one.keys.shape[1], -1))
        size = products.shape[-1]
        inverse = torch.linalg.solve_triangular(
            one.betas[0] * products[0].flatten(0, 1), torch.eye(size, dtype=state.dtype, device=state.device),
            upper=False, unitriangular=True)
        gates = one.gates[0]  # [heads, B]
        last = gates[:, -1:]
        updates = (inverse @ targets.transpose(0, 1)) * (last - gates).exp()[..., None]
        keys = one.keys[0].mT  # [key heads, k, B]
        keys = keys[:, None].expand(-1, len(state) // len(keys), -1, -1).flatten(0, 1)
        return torch.baddbmm(state * last.exp()[..., None], keys, updates)


def _blocks(entries: Entries, columns: Tensor) -> _Blocks:
    """Gather the blocks with the entries ``columns`` [b, B]."""
    gates = entries.log_decays[columns].cumsum(1).transpose(1, 2)
    hidden = _hidden(columns.shape[1], gates.dtype, gates.device)
    ratios = (gates[..., None] - gates[..., None, :] + hidden).exp()
    return _Blocks(entries.keys[columns].transpose(1, 2), gates, ratios,
                   entries.betas[columns].transpose(1, 2)[..., None])


@cache
def _hidden(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return minus infinity above the diagonal, 0 elsewhere: [B, B]."""
    return torch.full((block, block), -torch.inf, dtype=dtype, device=device).triu(1)


def fold(state: Tensor, entries: Entries) -> Tensor:
    """Return the state after a whole block: ``entries`` [B]."""
    columns = torch.arange(len(entries.keys), device=state.device)[None]
    return _blocks(entries, columns).fold(state, 0, entries.targets)


def convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution and its activation of n rows.

    inputs  [n, width, channels]: of a row's last ``width - 1`` ancestors, oldest first, then its own; zeros
            before the text
    weight  [channels, width]
    """
    return silu((inputs * weight.T).sum(1))
