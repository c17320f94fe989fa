"""The ledger of a session: which number was given to what, and what has been committed.

Knows numbers, positions, parents and the base; builds Segments and Prunes from them.  Does not
know tokens' scores, the shape of the tree, or why a row is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowspec_edge.messages import Int32, Prune, Segment, pack_bits


class Ledger:
    """Gives every row its number, once, and keeps the books that the visibility rule needs.

    A segment is built with :meth:`add` row by row, then :meth:`seal`.  Commits are announced by
    the next sealed segment, so every stage learns of them in order.
    """

    def __init__(self, session: int = 0, epoch: int = 0, taps: tuple[int, ...] = (), kept: int = 0) -> None:
        """``taps``: hidden states that are wanted of every row (``messages.Segment``); ``kept``: rows
        that the session begins with, text already and known to every stage (``messages.Open``)."""
        self.session = session
        self.epoch = epoch
        self.taps = taps
        self.next_number = kept
        self.base = kept  # one past the newest committed number
        self._run = 0
        self._parents: dict[int, int] = {}  # number -> parent's, from the base upwards
        self._commits: list[int] = []  # since the last sealed segment
        self._rows: list[tuple[int, int, int, int]] = []  # number, token, position, bits
        self._committed_rows: list[int] = []  # rows under construction that are text already
        self._sent_positions: dict[int, tuple[Int32, Int32]] = {}  # run -> numbers, positions
        self._prune_start = kept
        self._prune_commits: list[int] = []  # since the last prune
        self._prune_sequence = 0

    def add(self, token: int, position: int, parent: int = -1, committed: bool = False) -> int:
        """Append a row to the segment under construction; returns its number.

        ``parent`` is the number of the row's parent; -1, or any committed number, when it hangs
        directly on the committed text.  A ``committed`` row is text already when it is sent.
        """
        number = self.next_number
        self.next_number += 1
        bits = 1 << (number - self.base)
        ancestor = parent
        while ancestor >= self.base:
            bits |= 1 << (ancestor - self.base)
            ancestor = self._parents[ancestor]
        self._parents[number] = parent
        self._rows.append((number, token, position, bits))
        if committed:
            self._committed_rows.append(number)
        return number

    def seal(self, taps: tuple[int, ...] = ()) -> Segment:
        """The segment of all rows added since the last one; it may be empty.

        ``taps``: hidden states that are wanted of these rows, beside those that are wanted of all.
        """
        rows, self._rows = self._rows, []
        first = rows[0][0] if rows else self.next_number
        width = self.next_number - self.base
        numbers = np.array([r[0] for r in rows], dtype=np.int32)
        positions = np.array([r[2] for r in rows], dtype=np.int32)
        segment = Segment(
            session=self.session, epoch=self.epoch, run=self._run, first=first,
            stop=self.next_number, numbers=numbers, positions=positions, base=self.base,
            bits=pack_bits([r[3] for r in rows], width),
            committed=np.array(self._commits, dtype=np.int32),
            tokens=np.array([r[1] for r in rows], dtype=np.int32),
            taps=tuple(sorted({*self.taps, *taps})),
        )
        self._sent_positions[self._run] = (numbers, positions)
        self._run += 1
        self._commits = []
        done, self._committed_rows = self._committed_rows, []
        for number in done:
            self.commit(number)
        return segment

    def commit(self, number: int) -> None:
        """``number`` is text now; everything older that is not is dead."""
        if not self.base <= number < self.next_number or self._rows:
            raise ValueError(f"cannot commit number {number}: base {self.base}, "
                             f"next {self.next_number}, {len(self._rows)} rows unsealed")
        self._commits.append(number)
        self._prune_commits.append(number)
        for decided in range(self.base, number + 1):
            self._parents.pop(decided, None)
        self.base = number + 1

    def prune(self, keep: Iterable[int]) -> Prune:
        """The hint that of all numbers given out only the committed ones and ``keep`` live on."""
        survivors = self._prune_commits + sorted(n for n in keep if n >= self.base)
        message = Prune(self.session, self.epoch, self._prune_sequence, self._prune_start,
                        self.next_number, np.array(survivors, dtype=np.int32))
        self._prune_sequence += 1
        self._prune_start, self._prune_commits = self.base, []
        return message

    def skip_prune(self) -> None:
        """Leave everything decided so far out of coming prunes (after the prompt: all of it lives)."""
        self._prune_start, self._prune_commits = self.base, []

    def returned(self, run: int) -> tuple[Int32, Int32]:
        """The numbers and positions that were sent as ``run``; forgotten once asked for.

        Raises KeyError for a run that was never sent, or that has returned already.
        """
        return self._sent_positions.pop(run)

    @property
    def in_flight(self) -> int:
        """Segments that were sent and have not returned."""
        return len(self._sent_positions)
