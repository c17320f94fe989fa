"""What a session keeps of recurrent layers: states of the committed text, and an entry a row behind it.

The session's first ``first`` rows are folded into the states, and only the others have entries
(:mod:`delta_rule`): memory does not grow with the text.  Committed rows stay entries until a few are there to
fold at once, since reading and writing a state costs as much as many entries do.  A text that is longer than
that never becomes entries: a pass computes the states behind it, and ``append`` takes them.

A session that takes over another text begins at a snapshot: the states after each ``GRID`` rows of it,
of which the newest few are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.messages import Int32
from flowspec_edge.stage.layers import delta_rule
from flowspec_edge.stage.layers.attention import Part
from flowspec_edge.stage.layers.delta_rule import Entries, Rows
from flowspec_edge.util.tensors import indices, to_device

AT_ONCE = 16  # committed rows that are folded together; more of a text are never entries
GRID = 256  # rows between snapshots
REUSABLE = 2  # snapshots of a text, the newest, that a session may begin with
_KEPT = REUSABLE + 1  # one more than that, because a stage is ahead of the text that has come back to D0

Bool = NDArray[np.bool_]
State = tuple[Tensor, Tensor]  # of a layer: [heads, k, v], and the convolution's last inputs


@dataclass(frozen=True)
class GatedDelta:
    """Layers with the gated delta rule; a ``CacheKind``.

    kernel  rows that enter the convolution
    """

    key_heads: int
    heads: int
    key_width: int
    value_width: int
    kernel: int

    @classmethod
    def of(cls, config: Any) -> GatedDelta:
        return cls(int(config.linear_num_key_heads), int(config.linear_num_value_heads),
                   int(config.linear_key_head_dim), int(config.linear_value_head_dim),
                   int(config.linear_conv_kernel_dim))

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_width + self.heads * self.value_width

    def state_bytes(self, width: int) -> int:
        """Of a layer's state, however long the text is; ``width``: bytes of a value in the compute dtype."""
        return 4 * self.heads * self.key_width * self.value_width + (self.kernel - 1) * self.channels * width

    def entry_bytes(self, width: int) -> int:
        """Of a row that is not folded, in a layer."""
        return 4 * (self.key_heads * self.key_width + self.heads * (self.value_width + 1)
                    ) + self.channels * width

    def session_bytes(self, tentative: int, width: int) -> int:
        """Of a session in a layer, its snapshots included."""
        return (1 + _KEPT) * self.state_bytes(width) + self.rows(1 << 30, tentative) * self.entry_bytes(width)

    def rows(self, capacity: int, tentative: int) -> int:
        """Entries of a session of ``capacity`` rows, ``tentative`` of them uncommitted."""
        return min(capacity, tentative) + 2 * AT_ONCE

    def reusable(self, text: int, wanted: int) -> int:
        """Rows, at most ``wanted``, from which a session can go on whose text has ``text`` rows."""
        rows = wanted // GRID * GRID
        return rows if rows // GRID > text // GRID - REUSABLE else 0

    def arena(self, layers: Sequence[int], dtype: torch.dtype, device: torch.device, rows: int
              ) -> RecurrentArena:
        return RecurrentArena(self, layers, dtype, device)

    def row_bytes(self, width: int) -> int:
        """0: a row of the text takes no memory."""
        return 0

    def inputs(self, parts: Sequence[Part], index: int, dtype: torch.dtype, device: torch.device, rows: int
               ) -> tuple[RecurrentPass, None]:
        for part in parts:
            text = int(part.segment.numbers.searchsorted(part.segment.base))
            _held(part, index).begin(part.mask, text)
        return RecurrentPass(parts, index), None


class RecurrentPass:
    """The parts' caches, as a pass's layers take them."""

    def __init__(self, parts: Sequence[Part], kind: int) -> None:
        self._parts, self._kind = parts, kind

    def recurrent(self, layer_idx: int) -> Iterator[tuple[slice, RecurrentLayer | None]]:
        """The rows of each part and what it keeps of the layer; None for those that have ended."""
        start = 0
        for part in self._parts:
            held = None if part.ended else _held(part, self._kind).layers[layer_idx]
            yield slice(start, start + len(part)), held
            start += len(part)


def _held(part: Part, kind: int) -> RecurrentCache:
    held = part.cache.parts[kind]
    assert isinstance(held, RecurrentCache)
    return held


class RecurrentArena:
    """Allocates what each session takes: few large tensors, which do not fragment the memory."""

    def __init__(self, kind: GatedDelta, layers: Sequence[int], dtype: torch.dtype, device: torch.device
                 ) -> None:
        self.rows = 0
        self.row_bytes = len(layers) * kind.entry_bytes(dtype.itemsize)
        self._kind, self._layers, self._dtype, self._device = kind, layers, dtype, device
        self._caches: list[RecurrentCache] = []

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches)

    def missing(self, capacity: int, of: RecurrentCache | None = None) -> int:
        """In entries' bytes, also for the states of a new session."""
        if of is not None:
            return max(0, capacity - of.capacity)
        states = (1 + _KEPT) * self._kind.state_bytes(self._dtype.itemsize)
        return capacity - (-states // self._kind.entry_bytes(self._dtype.itemsize))

    def take(self, capacity: int) -> RecurrentCache:
        cache = RecurrentCache(self._kind, self._layers, capacity, self._dtype, self._device)
        self._caches.append(cache)
        return cache

    def widen(self, cache: RecurrentCache, capacity: int) -> None:
        cache.make_room(capacity)

    def give_back(self, cache: RecurrentCache) -> None:
        self._caches.remove(cache)


@dataclass(frozen=True, eq=False)
class _Pass:
    """cuts       ends of the pieces of the rows that are text and become part of the states, none if none do
    visible    [n, entries + n] bool: what the n other rows see
    ancestors  [n, kernel] int64: which inputs enter each row's convolution, its own last
    """

    cuts: tuple[int, ...]
    visible: Tensor
    ancestors: Tensor


class RecurrentCache:
    """A session's layers, by index in the model; a ``LayerCache``."""

    def __init__(self, kind: GatedDelta, layers: Sequence[int], capacity: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.first = 0
        self.capacity = capacity
        self._device, self._kernel = device, kind.kernel
        self._length = 0
        self._text: tuple[int, ...] = ()  # of the pass
        self.layers = {layer: RecurrentLayer(kind, capacity, dtype, device) for layer in layers}
        self._snapshots: dict[int, list[State]] = {}  # of all layers, by rows of text, the oldest first

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        kept = sum(tensor.nbytes for states in self._snapshots.values() for pair in states for tensor in pair)
        return kept + sum(layer.nbytes for layer in self.layers.values())

    def reserve(self, rows: int) -> None:
        """Nothing: ``begin`` knows how many of them are entries."""

    def begin(self, mask: Bool, text: int) -> None:
        """Before a pass.  FlowspecError unless its rows fit.

        mask  [n, first + len + n] bool: what its rows see
        text  of its rows, the first ones, are committed already; then the cached rows are, too
        """
        if text <= AT_ONCE:
            self._text = ()  # entries, as other rows are
            text = 0
        else:
            self._fold(self.first + self._length)
            ends = range(GRID - self.first % GRID, text, GRID)
            self._text = (*ends, text)
        seen = mask[text:, self.first + text:]
        if self._length + len(seen) > self.capacity:
            raise FlowspecError(f"recurrent layers hold {self._length} rows that are not folded, {len(seen)} "
                                f"more to come, capacity {self.capacity}: open the session with more "
                                "tentative rows")
        current = _Pass(self._text, to_device(torch.from_numpy(np.ascontiguousarray(seen)), self._device),
                        indices(_last_ancestors(seen, self._kernel), self._device))
        for layer in self.layers.values():
            layer.begin(current)

    @torch.inference_mode()
    def append(self, rows: int) -> None:
        text = self._text[-1] if self._text else 0
        cuts = [self.first + cut for cut in self._text]
        for place, rows_of_text in enumerate(cuts):
            for layer in self.layers.values():
                layer.take_text(place)
            self._folded(rows_of_text)
        for layer in self.layers.values():
            layer.append(rows - text)
        self._text = ()
        self._length += rows - text

    def commit(self, rows: int) -> None:
        if rows - self.first >= AT_ONCE:
            self._fold(rows)

    @torch.inference_mode()
    def keep(self, mask: Bool) -> None:
        slots = np.flatnonzero(mask)
        if len(slots) < self._length:
            first = int(mask.argmin())  # those before it stay in place
            moved = indices(slots[first:], self._device)
            for layer in self.layers.values():
                layer.keep(first, moved)
            self._length = len(slots)

    @torch.inference_mode()
    def _fold(self, rows: int) -> None:
        while self.first < rows:
            end = min(rows, (self.first // GRID + 1) * GRID)
            for layer in self.layers.values():
                layer.fold(end - self.first)
            self._length -= end - self.first
            self._folded(end)

    def _folded(self, rows: int) -> None:
        self.first = rows
        if rows % GRID == 0:
            self._snapshots[rows] = [layer.snapshot() for layer in self.layers.values()]
            for oldest in list(self._snapshots)[:-_KEPT]:
                del self._snapshots[oldest]

    @torch.inference_mode()
    def retain(self, rows: int) -> None:
        """Keep no more than snapshots of the text's first ``rows`` rows: a stage may have folded more."""
        self._fold(rows)
        self._snapshots = {at: states for at, states in self._snapshots.items() if at <= rows}
        self.first, self._length, self.capacity = rows, 0, 0
        for layer in self.layers.values():
            layer.make_room(0)

    @torch.inference_mode()
    def truncate(self, rows: int) -> None:
        if rows not in self._snapshots:
            raise ProtocolError(f"a session cannot begin with {rows} rows of a text whose recurrent layers "
                                f"kept the states after {list(self._snapshots) or 'none'}")
        self._snapshots = {at: states for at, states in self._snapshots.items() if at <= rows}
        for layer, state in zip(self.layers.values(), self._snapshots[rows], strict=True):
            layer.restore(state)
        self.first, self._length = rows, 0

    @torch.inference_mode()
    def make_room(self, capacity: int) -> None:
        self.capacity = capacity
        for layer in self.layers.values():
            layer.make_room(capacity)

    def fill(self, rows: int) -> None:
        self.first = rows

    def visible(self, mask: Bool, positions: Int32, columns: Int32) -> Bool:
        return mask[:, self.first:]

    def rows(self) -> dict[int, Tensor]:
        """The states."""
        return {index: layer.state for index, layer in self.layers.items()}


class RecurrentLayer:
    """state  [heads, k, v] float32: behind the folded rows; replaced, never changed in place"""

    def __init__(self, kind: GatedDelta, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kind, self._before = kind, kind.kernel - 1
        self.state = torch.zeros(kind.heads, kind.key_width, kind.value_width, device=device)
        self._length = 0  # entries
        self._entries = Entries(*(torch.empty(0, *size, device=device) for size in (
            (kind.key_heads, kind.key_width), (kind.heads, kind.value_width), (kind.heads,))))
        # The convolution's: of the last folded rows, then of each entry.
        self._inputs = torch.zeros(self._before, kind.channels, dtype=dtype, device=device)
        self._pass: _Pass | None = None
        self._behind: list[State] = []  # after each piece of the pass's text
        self.make_room(capacity)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.state, self._inputs, *self._entries))

    @property
    def entries(self) -> Entries:
        return self._some(slice(self._length))

    def _some(self, rows: slice) -> Entries:
        return Entries(*(tensor[rows] for tensor in self._entries))

    def make_room(self, capacity: int) -> None:
        """For so many entries, without those that there are."""
        self._length = 0
        self._entries = Entries(*(tensor.new_empty(capacity, *tensor.shape[1:]) for tensor in self._entries))
        inputs = self._inputs.new_empty(self._before + capacity, self._kind.channels)
        inputs[:self._before] = self._inputs[:self._before]
        self._inputs = inputs

    def snapshot(self) -> State:
        return self.state, self._inputs[:self._before].clone()

    def restore(self, state: State) -> None:
        self.state, self._inputs[:self._before] = state
        self._length = 0

    def begin(self, current: _Pass) -> None:
        self._pass = current
        self._behind.clear()

    def update(self, inputs: Tensor, weight: Tensor, log_decays: Tensor, betas: Tensor) -> Tensor:
        """The pass's outputs [n, heads, v] float32.

        inputs             [n, channels] of the convolution, whose ``weight`` is [channels, kernel]
        log_decays, betas  [n, heads] float32
        """
        current = self._pass
        assert current is not None
        state, before, text, outputs = self.state, self._inputs[:self._before], 0, []
        for end in current.cuts:
            chain = torch.cat((before, inputs[text:end]))
            windows = chain.unfold(0, self._kind.kernel, 1).mT.split(delta_rule.CHUNK)  # views
            mixed = torch.cat([delta_rule.convolved(window, weight) for window in windows])
            rows = self._rows(mixed, log_decays[text:end], betas[text:end])
            output, state = delta_rule.text(rows, state)
            before, text = chain[end - text :], end
            self._behind.append((state, before))
            outputs.append(output)
        if text < len(inputs):
            start, end = self._before + self._length, self._length + len(inputs) - text
            self._inputs[start : self._before + end] = inputs[text:]
            held = torch.cat((before, inputs[text:])) if text else self._inputs
            mixed = delta_rule.convolved(held[current.ancestors], weight)
            rows = self._rows(mixed, log_decays[text:], betas[text:])
            output, entries = delta_rule.segment(rows, state, self.entries, current.visible)
            for stored, new in zip(self._entries, entries, strict=True):
                stored[self._length : end] = new
            outputs.append(output)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _rows(self, mixed: Tensor, log_decays: Tensor, betas: Tensor) -> Rows:
        kind = self._kind
        width = kind.key_heads * kind.key_width
        queries, keys = (delta_rule.normalised(part.unflatten(-1, (kind.key_heads, -1)))
                         for part in mixed[:, : 2 * width].split(width, -1))
        values = mixed[:, 2 * width :].unflatten(-1, (kind.heads, -1))
        return Rows(queries * kind.key_width**-0.5, keys, values, log_decays, betas)

    def take_text(self, piece: int) -> None:
        """A piece of the pass's text is text of the session."""
        self.state, self._inputs[:self._before] = self._behind[piece]

    def append(self, rows: int) -> None:
        self._length += rows
        self._behind.clear()

    def fold(self, count: int) -> None:
        """The first ``count`` entries."""
        done, left = self._some(slice(count)), self._some(slice(count, self._length))
        self.state = delta_rule.fold(self.state, done)
        left.log_gates.sub_(done.log_gates[-1].clone())
        self._inputs[:self._before] = self._inputs[count : count + self._before].clone()
        self._move(0, slice(count, self._length))

    def keep(self, first: int, moved: Tensor) -> None:
        """Of the entries from ``first`` on, those in the slots ``moved``, increasing."""
        self._move(first, moved)

    def _move(self, first: int, slots: slice | Tensor) -> None:
        for tensor, before in ((self._inputs, self._before), *((tensor, 0) for tensor in self._entries)):
            rows = tensor[before:][slots].clone()
            tensor[before + first : before + first + len(rows)] = rows
        self._length = first + len(rows)


def _last_ancestors(seen: NDArray[np.bool_], kernel: int) -> NDArray[np.int64]:
    """[n, kernel] int64: the columns of each row's last ancestors, oldest first, and its own, where ``seen``
    [n, m + n] says what it sees of m entries and the n rows.  Columns begin behind ``kernel - 1`` rows of
    the text, into which they fall for a row with fewer ancestors."""
    n, before = len(seen), kernel - 1
    m = seen.shape[1] - n
    found = np.empty((n, kernel), dtype=np.int64)
    found[:, -1] = before + m + np.arange(n)
    if not n:
        return found
    above = seen.copy()
    above[np.arange(n), m + np.arange(n)] = False
    ranks = above[:, ::-1].cumsum(1)[:, ::-1]  # 1 for the last ancestor
    for back in range(1, kernel):
        missing = back - ranks[:, 0]
        column = (above & (ranks == back)).argmax(1)
        found[:, -1 - back] = np.where(missing > 0, before - missing, before + column)
    return found
