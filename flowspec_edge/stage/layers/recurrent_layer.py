"""What a recurrent layer keeps of a session.

It keeps its state after the folded rows, an entry for each other row (:mod:`delta_rule`), and one state behind a
block
of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.stage.layers import delta_rule
from flowspec_edge.stage.layers.delta_rule import FOLDED, DeltaPlan, DeltaRows, Entries
from flowspec_edge.util.kernels import HeadNorms

if TYPE_CHECKING:
    from typing_extensions import Self

_ROOM = 64  # rows by which the memory for entries grows, at least


class LayerSnapshot(NamedTuple):
    """A layer behind some rows of a text.

    state    [heads, k, v] after the rows of whole blocks
    entries  of the others
    inputs   of the convolution: of the last rows that are folded, then of the others
    """

    state: Tensor
    entries: Entries
    inputs: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.state, self.inputs, *self.entries))


@dataclass(frozen=True)
class DeltaShape:
    """The shape of a recurrent layer; ``kernel``: rows that enter the convolution."""

    key_heads: int
    heads: int
    key_width: int
    value_width: int
    kernel: int

    @classmethod
    def from_config(cls, config: DecoderConfig) -> Self:
        return cls(config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
                   config.linear_value_head_dim, config.linear_conv_kernel_dim)

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_width + self.heads * self.value_width

    def state_bytes(self, width: int) -> int:
        """Return the bytes of a layer's state, however long the text is.

        ``width``: bytes of a value in the compute dtype.
        """
        return 4 * self.heads * self.key_width * self.value_width + (self.kernel - 1) * self.channels * width

    def entry_bytes(self, width: int) -> int:
        """Return the bytes of a row that is not folded, in a layer."""
        return 4 * (self.key_heads * self.key_width + self.heads * (self.value_width + 2)
                    ) + self.channels * width


@dataclass(frozen=True, eq=False)
class DeltaPass:
    """What a pass' rows read.

    extra_state  the key of the state that the layers keep beside their own
    ancestors    [n, kernel] int64: which inputs enter each row's convolution, its own last
    """

    plan: DeltaPlan
    extra_state: int
    ancestors: Tensor


class RecurrentLayer:
    """A session's states and entries in one layer.

    state  [heads, k, v] float32: behind the folded rows; replaced, never changed in place
    ahead  the same behind the block that the last pass's plan names
    """

    def __init__(self, kind: DeltaShape, dtype: torch.dtype, device: torch.device) -> None:
        self._kind, self._before, self._norms = kind, kind.kernel - 1, _norms(kind, device)
        self.state = torch.zeros(kind.heads, kind.key_width, kind.value_width, device=device)
        self.ahead: Tensor | None = None
        self._length = 0  # entries
        self._entries = Entries(*(torch.empty(0, *size, device=device) for size in (
            (kind.key_heads, kind.key_width), (kind.heads, kind.value_width), (kind.heads,), (kind.heads,))))
        # The convolution's inputs: those of the last folded rows, then those of each entry.
        self._inputs = torch.zeros(self._before, kind.channels, dtype=dtype, device=device)
        self._pass: DeltaPass | None = None

    @property
    def nbytes(self) -> int:
        ahead = 0 if self.ahead is None else self.ahead.nbytes
        return ahead + sum(tensor.nbytes for tensor in (self.state, self._inputs, *self._entries))

    @property
    def entries(self) -> Entries:
        return self._some(slice(self._length))

    def _some(self, rows: slice) -> Entries:
        return Entries(*(tensor[rows] for tensor in self._entries))

    def clear(self) -> None:
        """Drop the state and all entries, with their memory; ``restore`` comes before the next pass."""
        self._length, self.state, self.ahead = 0, self.state.new_empty(0), None
        self._entries = Entries(*(tensor.new_empty(0, *tensor.shape[1:]) for tensor in self._entries))
        self._inputs = self._inputs[:self._before].clone()

    def make_room(self, entries: int) -> None:
        """Make room for at least ``entries`` entries."""
        room = len(self._entries.keys)
        if entries > room:
            more = max(_ROOM, entries - room, room)
            self._entries = Entries(*(torch.cat((tensor, tensor.new_empty(more, *tensor.shape[1:])))
                                      for tensor in self._entries))
            self._inputs = torch.cat((self._inputs, self._inputs.new_empty(more, self._kind.channels)))

    def snapshot(self, entries: int) -> LayerSnapshot:
        """Copy what the layer is behind the first ``entries``, fewer than a block."""
        return LayerSnapshot(self.state, Entries(*(tensor.clone() for tensor in self._some(slice(entries)))),
                        self._inputs[: self._before + entries].clone())

    def restore(self, snapshot: LayerSnapshot) -> None:
        self.state, self.ahead = snapshot.state, None
        self._length = len(snapshot.entries.keys)
        self.make_room(self._length)
        for tensor, source in zip((*self._entries, self._inputs), (*snapshot.entries, snapshot.inputs), strict=True):
            tensor[: len(source)] = source

    def fill(self, entries: int) -> None:
        """Make an empty layer look as if it held ``entries`` entries of zeros."""
        self.make_room(entries)
        for tensor in (*self._some(slice(entries)), self._inputs) if entries else ():
            tensor.zero_()
        self._length = entries

    def begin(self, current: DeltaPass) -> None:
        self._pass = current

    def update(self, inputs: Tensor, weight: Tensor, log_decays: Tensor, betas: Tensor) -> Tensor:
        """Return the pass's outputs [n, heads, v] float32.

        inputs             [n, channels] of the convolution, whose ``weight`` is [channels, kernel]
        log_decays, betas  [n, heads] float32
        """
        current = self._pass
        assert current is not None
        start, end = self._before + self._length, self._length + len(inputs)
        self._inputs[start : self._before + end] = inputs
        mixed = delta_rule.convolved(self._inputs[current.ancestors], weight)
        states = {FOLDED: self.state}
        if current.extra_state != FOLDED:
            assert self.ahead is not None
            states[current.extra_state] = self.ahead
        outputs, self.ahead = delta_rule.segment(self._rows(mixed, log_decays, betas), states, self._some(slice(end)),
                                                 current.plan)
        return outputs

    def _rows(self, mixed: Tensor, log_decays: Tensor, betas: Tensor) -> DeltaRows:
        kind = self._kind
        width = 2 * kind.key_heads * kind.key_width
        both = mixed[:, :width].unflatten(-1, (2 * kind.key_heads, -1))
        self._norms.in_place(both)
        queries, keys = both.chunk(2, 1)
        return DeltaRows(queries, keys, mixed[:, width:].unflatten(-1, (kind.heads, -1)), log_decays, betas)

    def append(self, rows: int) -> None:
        self._length += rows

    def fold(self, block: int) -> None:
        """Fold the first ``block`` entries, a whole block."""
        self.state = delta_rule.fold(self.state, self._some(slice(block)))
        self._folded(block)

    def advance(self, count: int) -> None:
        """Fold the first ``count`` entries, whose state is ``ahead``."""
        assert self.ahead is not None
        self.state, self.ahead = self.ahead, None
        self._folded(count)

    def _folded(self, count: int) -> None:
        self._inputs[: self._before] = self._inputs[count : count + self._before].clone()
        self._move(0, slice(count, self._length))

    def keep(self, first: int, moved: Tensor) -> None:
        """Drop the entries from ``first`` on, except those in the slots ``moved``.

        The slots are in increasing order.  Entries before ``first`` stay.
        """
        self._move(first, moved)

    def _move(self, first: int, slots: slice | Tensor) -> None:
        for tensor, before in ((self._inputs, self._before), *((tensor, 0) for tensor in self._entries)):
            rows = tensor[before:][slots].clone()
            tensor[before + first : before + first + len(rows)] = rows
        self._length = first + len(rows)


@cache
def _norms(kind: DeltaShape, device: torch.device) -> HeadNorms:
    """Make the norms of queries, divided by sqrt(k), and keys.

    They have length 1, but for the term that transformers adds to the sum of squares, so that zeros stay finite.
    """
    weights = torch.full((2 * kind.key_heads, kind.key_width), kind.key_width**-0.5, device=device)
    weights[: kind.key_heads] *= kind.key_width**-0.5
    return HeadNorms(weights, 1e-6 / kind.key_width)


def last_ancestors(visible: NDArray[np.bool_], kernel: int) -> NDArray[np.int64]:
    """Return the columns of each row's last ancestors, oldest first, and its own: [n, kernel] int64.

    ``visible`` [n, m + n] says what a row sees of m entries and the n rows.  Columns begin behind ``kernel - 1`` rows
    of the text, into which they fall for a row with fewer ancestors.
    """
    n, before = len(visible), kernel - 1
    m = visible.shape[1] - n
    ancestors = np.empty((n, kernel), dtype=np.int64)
    ancestors[:, -1] = before + m + np.arange(n)
    if not n:
        return ancestors
    above = visible.copy()
    above[np.arange(n), m + np.arange(n)] = False
    ranks = above[:, ::-1].cumsum(1)[:, ::-1]  # 1 for the last ancestor
    for back in range(1, kernel):
        missing = back - ranks[:, 0]
        column = (above & (ranks == back)).argmax(1)
        ancestors[:, -1 - back] = np.where(missing > 0, before - missing, before + column)
    return ancestors
