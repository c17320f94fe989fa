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
    """The entries of rows that are not folded into the state, parents first."""

    keys: Tensor
    targets: Tensor  # w
    log_decays: Tensor
    betas: Tensor


class DeltaFold(NamedTuple):
    """The state with ``key`` follows the one with ``before`` by the block ``block``."""

    key: int
    before: int
    block: int


@dataclass(frozen=True, eq=False)
class DeltaStep:
    """Rows of a pass whose blocks begin at one place of the text, after the steps before it: r rows.

    folds    what is to be computed before: states behind blocks of earlier steps
    rows     which of the pass they are
    columns  of these rows
    tiles    a state's key each: the products with this state take the keys and queries of up to B rows
    tiled    [tiles, heads, 2B] int64: these, in [n, 2, key heads] of the pass; the last row is repeated
    products  [r, 2] int64 each: the tile of a row's key and query, and their places there
    places   [r] int64 each: the rows' blocks, and the places there
    bags     [r * heads * B] int64: in [columns, heads] of all entries, those of a row's block
    begins   [r * heads] int64: where each bag begins
    """

    folds: tuple[DeltaFold, ...]
    rows: slice | Tensor
    columns: slice | Tensor
    tiles: tuple[int, ...]
    tiled: Tensor
    products: tuple[Tensor, Tensor]
    places: tuple[Tensor, Tensor]
    bags: Tensor
    begins: Tensor


@dataclass(frozen=True, eq=False)
class DeltaPlan:
    """How the n rows of a pass are computed, of which m + n columns are entries afterwards.

    columns  [blocks, B] int64: of each block, the oldest first, the last one repeated
    keys     [blocks, key heads, B] int64: the same in [columns, key heads]
    queries  [blocks, key heads, B] int64: in [n, key heads], the pass's rows at these columns; any where there is none
    outputs  [n] int64: where each row is in the results of all steps; None if that is its own place
    ahead    the key of the state that the layer keeps beside its own: FOLDED for none
    """

    columns: Tensor
    keys: Tensor
    queries: Tensor
    outputs: Tensor | None
    steps: tuple[DeltaStep, ...]
    ahead: int


class _Block(NamedTuple):
    step: int
    columns: list[int]


def make_plan(visible: NDArray[np.bool_], heads: tuple[int, int], block: int, ahead: int, device: torch.device
              ) -> DeltaPlan:
    """Plan a pass.

    visible  [n, m + n]: what each row sees of m entries, which begin with a block, and of the rows; itself, its
             ancestors and nothing else, parents before children
    heads    how many key heads and heads a layer has
    ahead    the key of the state that is at hand beside the layer's own
    """
    n, m = len(visible), visible.shape[1] - len(visible)
    paths = [np.flatnonzero(row).tolist() for row in visible]
    begins = [(len(path) - 1) // block for path in paths]  # the step of each row
    states = [path[step * block - 1] if step else FOLDED for path, step in zip(paths, begins, strict=True)]
    blocks: list[_Block] = []
    where: dict[int, tuple[int, int]] = {}
    for row in reversed(range(n)):
        if m + row not in where:
            _add_block(blocks, where, paths[row], block)
    folds = _folds(paths, states, blocks, where, block, ahead)
    drafts: list[tuple[tuple[DeltaFold, ...], tuple[int, ...]]] = []
    arrays: list[list[int]] = []
    sequence: list[int] = []  # all rows, step by step
    numbers = sorted({part.step for part in blocks})
    for number in numbers:
        rows = [row for row in range(n) if begins[row] == number]
        sequence += rows
        keys, tiles, tiled = _tiles(rows, states, block)
        at = [where[m + row] for row in rows]
        drafts.append((tuple(fold for fold in folds if blocks[fold.block].step == number - 1), keys))
        arrays += [rows, tiles, [tile for tile, _ in tiled], [offset for _, offset in tiled],
                   [index for index, _ in at], [offset for _, offset in at]]
    columns = [column for part in blocks for column in _padded(part.columns, block)]
    arrays += [columns, [max(0, column - m) for column in columns], np.argsort(sequence).tolist()]
    *step_arrays, filled, queries, outputs = _uploaded(arrays, device)
    filled = filled.view(-1, block)
    steps = [_step(step_arrays[6 * i : 6 * i + 6], *draft, filled, m, heads, len(numbers) == 1)
             for i, draft in enumerate(drafts)]
    return DeltaPlan(filled, _by_head(filled, heads[0]), _by_head(queries.view(-1, block), heads[0]),
                     None if len(steps) == 1 else outputs, tuple(steps), _next_ahead(states, paths, block, ahead))


def _step(arrays: Sequence[Tensor], folds: tuple[DeltaFold, ...], keys: tuple[int, ...], columns: Tensor, m: int,
          heads: tuple[int, int], alone: bool) -> DeltaStep:
    """Make a step from the numbers of its rows and tiles.

    ``arrays``: its rows' numbers, the rows of its tiles, the rows' tiles and places there, their blocks and places
    there; ``alone``: the step
    has all rows of the pass.
    """
    rows, tiles, tile, tile_offset, blocks, places = arrays
    block = columns.shape[1]
    sides = torch.arange(2, device=rows.device)
    group = torch.arange(heads[1], device=rows.device) // (heads[1] // heads[0])  # the key head of each head
    both = (tiles.view(-1, 1, block) * 2 + sides[:, None]) * heads[0]  # [tiles, 2, B]
    bags = _by_head(columns[blocks], heads[1]).flatten()
    return DeltaStep(folds, slice(None) if alone else rows, slice(m, None) if alone else rows + m, keys,
                (both.flatten(1)[:, None] + group[:, None]), (tile[:, None], tile_offset[:, None] + sides * block),
                (blocks, places), bags, torch.arange(0, len(bags), block, device=rows.device))


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """Return where the ``heads`` of ``rows`` [b, B] are in an array by row and head: [b, heads, B]."""
    return rows[:, None] * heads + torch.arange(heads, device=rows.device)[:, None]


def _add_block(blocks: list[_Block], where: dict[int, tuple[int, int]], path: Sequence[int], block: int) -> None:
    """Add the block in which ``path`` ends.

    where  by column: the index of a block with it, and its place there
    """
    step = (len(path) - 1) // block
    columns = list(path[step * block :])
    for offset, column in enumerate(columns):
        where.setdefault(column, (len(blocks), offset))
    blocks.append(_Block(step, columns))


def _folds(paths: Sequence[list[int]], states: Sequence[int], blocks: list[_Block],
           where: dict[int, tuple[int, int]], block: int, ahead: int) -> list[DeltaFold]:
    """Return how to compute the states before the rows with ``paths``; may add blocks."""
    folds: dict[int, DeltaFold] = {}
    for path, state in zip(paths, states, strict=True):
        key, step = state, (len(path) - 1) // block
        while key not in (FOLDED, ahead) and key not in folds:
            if key not in where:
                _add_block(blocks, where, path[: step * block], block)
            step -= 1
            before = path[step * block - 1] if step else FOLDED
            folds[key] = DeltaFold(key, before, where[key][0])
            key = before
    return list(folds.values())


def _tiles(rows: Sequence[int], states: Sequence[int], block: int
           ) -> tuple[tuple[int, ...], list[int], list[tuple[int, int]]]:
    """Group rows with the same state into tiles of ``block`` rows, padded.

    Return each tile's state key, all rows in tile order, and for each input row its tile and place.
    """
    keys: list[int] = []
    tiles: list[list[int]] = []
    newest: dict[int, int] = {}  # the tile of a state that is not full yet
    tiled = []
    for row in rows:
        tile = newest.get(states[row])
        if tile is None or len(tiles[tile]) == block:
            tile = newest[states[row]] = len(tiles)
            keys.append(states[row])
            tiles.append([])
        tiled.append((tile, len(tiles[tile])))
        tiles[tile].append(row)
    return tuple(keys), [row for tile in tiles for row in _padded(tile, block)], tiled


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[values[-1]] * (length - len(values))]


def _next_ahead(states: Sequence[int], paths: Sequence[Sequence[int]], block: int, ahead: int) -> int:
    """Return the key of the state that most of the rows farthest on need: the next pass is likely to need it."""
    step_rows = {key: ((len(path) - 1) // block, states.count(key)) for path, key in zip(paths, states, strict=True)
                 if key != FOLDED}
    return max(step_rows, key=step_rows.__getitem__, default=ahead)


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
    blocks = _gathered(entries, plan.columns, plan.keys)
    weights = blocks.weights(rows.queries.flatten(0, 1)[plan.queries])
    both = torch.stack((rows.keys, rows.queries), 1).flatten(0, 2)
    at_hand, outputs, ahead = states, [], None
    for step in plan.steps:
        at_hand = {**states, **{key: blocks.fold(at_hand[before], block, entries.targets[plan.columns[block]])
                                for key, before, block in step.folds}}
        ahead = at_hand.get(plan.ahead, ahead)
        if step.tiles:
            in_blocks, places = step.places
            gates = blocks.gates[in_blocks, :, places].exp()  # [r, heads]
            remembered = _remembered(both[step.tiled], at_hand, step) * gates[:, None, :, None]
            entries.targets[step.columns] = ((rows.values[step.rows] - remembered[:, 0])
                                             * rows.betas[step.rows][..., None])
            corrections = _summed(weights[in_blocks, :, places], entries.targets, step)
            outputs.append(remembered[:, 1] + corrections)
    row_outputs = outputs[0] if plan.outputs is None else torch.cat(outputs)[plan.outputs]
    return row_outputs, None if plan.ahead == FOLDED else ahead


def _summed(weights: Tensor, targets: Tensor, step: DeltaStep) -> Tensor:
    """Return the weighted sums of ``targets`` over the step's blocks, an entry after the other: [r, heads, v].

    ``targets`` are [m + n, heads, v], ``weights`` [r, heads, B].  Nothing is gathered in memory.
    """
    return F.embedding_bag(step.bags, targets.flatten(0, 1), step.begins, mode="sum",
                           per_sample_weights=weights.reshape(-1)).view(*weights.shape[:2], -1)


def _remembered(tiles: Tensor, states: Mapping[int, Tensor], step: DeltaStep) -> Tensor:
    """Return the products of the step's r rows' keys and queries with their states: [r, 2, heads, v].

    tiles  [tiles, heads, 2B, k]
    """
    products = [tile @ states[key] for tile, key in zip(tiles, step.tiles, strict=True)]  # [heads, 2B, v] each
    tile, offset = step.products
    return (products[0][None] if len(products) == 1 else torch.stack(products))[tile, :, offset]


class _Blocks(NamedTuple):
    """What the blocks' keys give.

    keys    [b, key heads, B, k]
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

        queries  [b, key heads, B, k]; those that belong to no row of the pass may be any
        """
        products = self._times_keys(torch.cat((self.keys, queries), 2)).unflatten(3, (2, -1))
        scaled = products * self.ratios.unflatten(1, (self.keys.shape[1], -1))[:, :, :, None]
        coupled, outputs = scaled.flatten(1, 2).unbind(2)  # [b, heads, B, B] each
        # The diagonal of the system is not read.
        return torch.linalg.solve_triangular(self.betas * coupled, outputs, upper=False, left=False, unitriangular=True)

    def _times_keys(self, rows: Tensor) -> Tensor:
        """Return the products of rows [b, key heads, r, k] with the blocks' keys: [b, key heads, 1, r, B]."""
        return (rows.flatten(0, 1) @ self.keys.flatten(0, 1).mT).unflatten(0, self.keys.shape[:2])[:, :, None]

    def fold(self, state: Tensor, block: int, targets: Tensor) -> Tensor:
        """Return the state after the whole block ``block``, whose entries have ``targets`` [B, heads, v]."""
        single = _Blocks(*(tensor[block : block + 1] for tensor in self))
        products = single._times_keys(single.keys) * single.ratios.unflatten(1, (single.keys.shape[1], -1))
        size = products.shape[-1]
        inverse = torch.linalg.solve_triangular(
            single.betas[0] * products[0].flatten(0, 1), torch.eye(size, dtype=state.dtype, device=state.device),
            upper=False, unitriangular=True)
        gates = single.gates[0]  # [heads, B]
        last = gates[:, -1:]
        updates = (inverse @ targets.transpose(0, 1)) * (last - gates).exp()[..., None]
        keys = single.keys[0].mT  # [key heads, k, B]
        keys = keys[:, None].expand(-1, len(state) // len(keys), -1, -1).flatten(0, 1)
        return torch.baddbmm(state * last.exp()[..., None], keys, updates)


def _gathered(entries: Entries, columns: Tensor, keys: Tensor) -> _Blocks:
    """Gather the blocks with the entries ``columns`` [b, B], whose keys are ``keys`` [b, key heads, B]."""
    gates = entries.log_decays[columns].cumsum(1).transpose(1, 2)
    hidden = _hidden(columns.shape[1], gates.dtype, gates.device)
    ratios = (gates[..., None] - gates[..., None, :] + hidden).exp()
    return _Blocks(entries.keys.flatten(0, 1)[keys], gates, ratios, entries.betas[columns].transpose(1, 2)[..., None])


@cache
def _hidden(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return minus infinity above the diagonal, 0 elsewhere: [B, B]."""
    return torch.full((block, block), -torch.inf, dtype=dtype, device=device).triu(1)


def fold(state: Tensor, entries: Entries) -> Tensor:
    """Return the state after a whole block: ``entries`` [B]."""
    columns = torch.arange(len(entries.keys), device=state.device)[None]
    return _gathered(entries, columns, _by_head(columns, entries.keys.shape[1])).fold(state, 0, entries.targets)


def convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the causal convolution of n rows, after its activation.

    inputs  [n, width, channels]: of a row's last ``width - 1`` ancestors, oldest first, then its own; zeros
            before the text
    weight  [channels, width]
    """
    return silu((inputs * weight.T).sum(1))
