"""The rows that SPD's module looks back on: text and tree, their states, their keys and values.

Knows which hidden states of a row have arrived, how deep it is therefore known, who its ancestors
are, and where its keys and values lie.  Does not know the module: what is to be computed it hands
out, and takes the results.

A row's keys and values depend on nothing but its own feature, so they stand until a deeper state
of the row arrives, whether it is text or still a guess, and go with it when a guess becomes text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.messages import Tap
from flowspec_edge.tensors import to_device, to_torch

_UNKNOWN = -1
_FIRST_CAPACITY = 256


@dataclass(slots=True, eq=False)
class Row:
    """One position of the text or one node of the tree.

    number  the ledger's, -1 while it is not known
    slot    where its keys and values lie; -1: the row is gone
    known   layers passed of the state that these were computed from; -1: not computed yet
    """

    token: int
    position: int
    parent: Row | None
    slot: int
    number: int = _UNKNOWN
    known: int = _UNKNOWN
    is_text: bool = False
    children: dict[int, Row] = field(default_factory=dict)


class RowStore:
    """One session's rows.

    ``layers`` is the target's number of layers: the depth of the final state.
    """

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.text: list[Row] = []
        self._open: dict[int, Row] = {}  # text rows by slot whose keys and values may still change
        self._states: dict[int, dict[int, Tensor]] = {}  # number -> layers passed -> hidden state [H]
        self._awaited: set[int] = set()  # numbers of open text rows
        self._newest = _UNKNOWN  # the newest number that is text and has its final state
        self._free: list[int] = []
        self._holds_text = np.zeros(_FIRST_CAPACITY, dtype=bool)  # by slot
        self.slots = 0  # in use or free: one past the highest

    # ---- what arrives ----------------------------------------------------------------------

    def tap(self, message: Tap) -> None:
        """Keep the states of rows that may still be looked at."""
        hidden = to_device(to_torch(message.hidden), self._device).to(self._dtype)
        for number, state in zip(message.numbers.tolist(), hidden, strict=True):
            if number > self._newest or number in self._awaited:
                self._states.setdefault(number, {})[message.layer] = state

    def first(self, token: int) -> None:
        """The text begins."""
        self._append(Row(token, 0, None, self._take_slot()))

    def commit(self, tokens: Sequence[int], features: Tensor, numbers: Sequence[int]) -> None:
        """Append ``tokens``; row i of ``features`` is the final state of the row before token i."""
        hidden = features.to(self._device, self._dtype)
        for token, number, state in zip(tokens, numbers, hidden, strict=True):
            last = self.text[-1]
            self.number(last, number)
            self._states.setdefault(number, {})[self._layers] = state
            row = last.children.pop(token, None)
            for other in last.children.values():
                self._drop(other)
            last.children.clear()
            self._append(row or Row(token, last.position + 1, None, self._take_slot()))
        self._newest = max(self._newest, int(numbers[-1]))
        self._forget()

    def number(self, row: Row, number: int) -> None:
        """Learn a row's number, if it is one."""
        if number in (_UNKNOWN, row.number):
            return
        if row.number != _UNKNOWN:  # sent again under another number, whose states are others
            row.known = _UNKNOWN
            self._awaited.discard(row.number)
        row.number = number
        if row.is_text:
            self._awaited.add(number)

    def child(self, parent: Row, token: int) -> Row:
        """The tree row of ``token`` below ``parent``, made if there is none."""
        row = parent.children.get(token)
        if row is None:
            row = parent.children[token] = Row(token, parent.position + 1, parent, self._take_slot())
        return row

    # ---- what the module is asked for --------------------------------------------------------

    def state(self, row: Row, layer: int) -> Tensor:
        """The hidden state [H] of ``row`` after ``layer`` > 0 layers; it must have arrived."""
        return self._states[row.number][layer]

    def depth(self, row: Row) -> int:
        """Layers behind the deepest state of ``row`` whose middle state is here too; 0: none."""
        states = self._states.get(row.number, {})
        usable = (layer for layer in states if layer and (layer // 2 == 0 or layer // 2 in states))
        return max(usable, default=0)

    def stale(self, queries: Sequence[Row]) -> list[tuple[Row, int]]:
        """The older rows of ``queries`` whose keys and values are to be computed, and their depths."""
        older: dict[int, Row] = dict(self._open)
        for query in queries:
            older.update((row.slot, row) for row in self._guesses_above(query))
        newest = self.text[-1] if all(query.is_text for query in queries) else None
        found = ((row, self.depth(row)) for row in older.values() if row is not newest)
        return [(row, depth) for row, depth in found if depth > row.known]

    def computed(self, rows: Sequence[tuple[Row, int]]) -> None:
        """The keys and values of these rows stand in their slots now."""
        for row, depth in rows:
            row.known = depth
            if row.is_text and depth == self._layers:
                self._close(row)

    def visible(self, queries: Sequence[Row]) -> Tensor:
        """bool [queries, slots], on the CPU: the text and the guesses above each query, never itself."""
        mask = np.tile(self._holds_text[: self.slots], (len(queries), 1))
        for i, query in enumerate(queries):
            for row in self._guesses_above(query):
                mask[i, row.slot] = True
            mask[i, query.slot] = False
        return torch.from_numpy(mask)

    # ---- inside ------------------------------------------------------------------------------

    def _guesses_above(self, row: Row) -> Iterator[Row]:
        ancestor = row.parent
        while ancestor is not None and not ancestor.is_text:
            yield ancestor
            ancestor = ancestor.parent

    def _append(self, row: Row) -> None:
        row.is_text, row.parent = True, None
        self._holds_text[row.slot] = True
        self.text.append(row)
        self._open[row.slot] = row
        if row.number != _UNKNOWN:
            self._awaited.add(row.number)

    def _close(self, row: Row) -> None:
        """Nothing can change the row any more, so its states may go."""
        self._open.pop(row.slot, None)
        self._awaited.discard(row.number)
        self._states.pop(row.number, None)

    def _drop(self, row: Row) -> None:
        for below in row.children.values():
            self._drop(below)
        self._free.append(row.slot)
        row.slot = _UNKNOWN

    def _forget(self) -> None:
        """Let the states of dead rows go: decided, and not text that is still awaited."""
        self._states = {n: s for n, s in self._states.items() if n > self._newest or n in self._awaited}

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self.slots == len(self._holds_text):
            self._holds_text = np.pad(self._holds_text, (0, self.slots))
        self.slots += 1
        return self.slots - 1
