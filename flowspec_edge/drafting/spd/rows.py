"""The text and tree rows that SPD's module attends to: states, and slots of keys and values.

Keys and values depend only on the row's own feature: they are valid until a deeper state of it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.messages import Tap
from flowspec_edge.util.tensors import to_device, to_torch

_UNKNOWN = -1
_FIRST_CAPACITY = 256


@dataclass(slots=True, eq=False)
class SpdRow:
    """A text position or a tree node.

    number  -1: unknown
    slot    of its keys and values; -1: the row is gone
    known   depth, in layers, of the state that they were computed from; -1: not computed
    """

    token: int
    position: int
    parent: SpdRow | None
    slot: int
    number: int = _UNKNOWN
    known: int = _UNKNOWN
    is_text: bool = False
    children: dict[int, SpdRow] = field(default_factory=dict)


class RowStore:
    """One session's rows; ``layers`` is the target's, the depth of the final state."""

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self.reset()

    def reset(self) -> None:
        self.text: list[SpdRow] = []
        self._open: dict[int, SpdRow] = {}  # text rows by slot whose keys and values may still change
        self._states: dict[int, dict[int, Tensor]] = {}  # number -> layers passed -> hidden state [H]
        self._awaited: set[int] = set()  # numbers of open text rows
        self._newest = _UNKNOWN  # the newest number that is text and has its final state
        self._free: list[int] = []
        self._holds_text = np.zeros(_FIRST_CAPACITY, dtype=bool)  # by slot
        self.slots = 0  # in use or free: one past the highest

    # ---- arrivals ----------------------------------------------------------------------

    def tap(self, message: Tap) -> None:
        hidden = to_device(to_torch(message.hidden), self._device).to(self._dtype)
        for number, state in zip(message.numbers.tolist(), hidden, strict=True):
            if number > self._newest or number in self._awaited:
                self._states.setdefault(number, {})[message.layer] = state

    def begin(self, token: int) -> None:
        """The text begins with ``token``."""
        self._append(SpdRow(token, 0, None, self._take_slot()))

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
            self._append(row or SpdRow(token, last.position + 1, None, self._take_slot()))
        self._newest = max(self._newest, int(numbers[-1]))
        self._states = {n: s for n, s in self._states.items() if n > self._newest or n in self._awaited}

    def number(self, row: SpdRow, number: int) -> None:
        """Set a row's number, unless it is -1."""
        if number in (_UNKNOWN, row.number):
            return
        if row.number != _UNKNOWN:  # resent under another number, with other states
            row.known = _UNKNOWN
            self._awaited.discard(row.number)
        row.number = number
        if row.is_text:
            self._awaited.add(number)

    def child(self, parent: SpdRow, token: int) -> SpdRow:
        row = parent.children.get(token)
        if row is None:
            row = parent.children[token] = SpdRow(token, parent.position + 1, parent, self._take_slot())
        return row

    # ---- queries -----------------------------------------------------------

    def state(self, row: SpdRow, layer: int) -> Tensor:
        """[H], after ``layer`` > 0 layers; the state must have arrived."""
        return self._states[row.number][layer]

    def depth(self, row: SpdRow) -> int:
        """Layers passed by the deepest state whose middle state has arrived too; 0: none."""
        states = self._states.get(row.number, {})
        usable = (layer for layer in states if layer and (layer // 2 == 0 or layer // 2 in states))
        return max(usable, default=0)

    def stale_rows(self, queries: Sequence[SpdRow]) -> list[tuple[SpdRow, int]]:
        """Older rows visible to ``queries`` with outdated keys and values, and their depths."""
        older: dict[int, SpdRow] = dict(self._open)
        for query in queries:
            older.update((row.slot, row) for row in self._guesses_above(query))
        newest = self.text[-1] if all(query.is_text for query in queries) else None
        found = ((row, self.depth(row)) for row in older.values() if row is not newest)
        return [(row, depth) for row, depth in found if depth > row.known]

    def mark_computed(self, rows: Sequence[tuple[SpdRow, int]]) -> None:
        for row, depth in rows:
            row.known = depth
            if row.is_text and depth == self._layers:
                self._open.pop(row.slot, None)
                self._awaited.discard(row.number)
                self._states.pop(row.number, None)

    def visible(self, queries: Sequence[SpdRow]) -> Tensor:
        """bool [queries, slots], on the CPU: the text and the guesses above each query, without itself."""
        mask = np.tile(self._holds_text[: self.slots], (len(queries), 1))
        for i, query in enumerate(queries):
            for row in self._guesses_above(query):
                mask[i, row.slot] = True
            mask[i, query.slot] = False
        return torch.from_numpy(mask)

    def _guesses_above(self, row: SpdRow) -> Iterator[SpdRow]:
        ancestor = row.parent
        while ancestor is not None and not ancestor.is_text:
            yield ancestor
            ancestor = ancestor.parent

    def _append(self, row: SpdRow) -> None:
        row.is_text, row.parent = True, None
        self._holds_text[row.slot] = True
        self.text.append(row)
        self._open[row.slot] = row
        if row.number != _UNKNOWN:
            self._awaited.add(row.number)

    def _drop(self, row: SpdRow) -> None:
        for below in row.children.values():
            self._drop(below)
        self._free.append(row.slot)
        row.slot = _UNKNOWN

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self.slots == len(self._holds_text):
            self._holds_text = np.pad(self._holds_text, (0, self.slots))
        self.slots += 1
        return self.slots - 1
