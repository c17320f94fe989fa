"""Numbers the rows of a session and builds its Segments and Prunes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowspec_edge.messages import Int32, Prune, Segment, pack_bits


class SegmentBuilder:
    """:meth:`add` rows, then :meth:`seal` the segment; it announces the commits since the one before it."""

    def __init__(self, session: int = 0, epoch: int = 0, taps: tuple[int, ...] = (), reused_rows: int = 0) -> None:
        """Begin a session's numbers.

        ``taps``: as ``Segment.taps``, of every row; ``reused_rows``: committed rows that every stage holds.
        """
        self.session = session
        self.epoch = epoch
        self.taps = taps
        self.next_number = reused_rows
        self.base = reused_rows  # one past the newest committed number
        self._run = 0
        self._parents: dict[int, int] = {}  # number -> parent's, from the base upwards
        self._commits: list[int] = []  # since the last sealed segment
        self._rows: list[tuple[int, int, int, int]] = []  # number, token, position, bits
        self._committed_rows: list[int] = []  # rows under construction that are text already
        self._sent_positions: dict[int, tuple[Int32, Int32]] = {}  # run -> numbers, positions
        self._prune_start = reused_rows
        self._prune_commits: list[int] = []  # since the last prune
        self._prune_sequence = 0
        self.most_undecided: int | None = None  # rows since the newest committed one; None: any number

    def add(self, token: int, position: int, parent: int = -1, committed: bool = False) -> int:
        """Append a row; returns its number.

        ``parent``: -1, or any committed number, for a row directly below the committed text.  ValueError for more
        rows than ``most_undecided``.
        """
        number = self.next_number
        if self.most_undecided is not None and number - self.base >= self.most_undecided:
            raise ValueError(f"more than {self.most_undecided} rows of which none became text")
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
        """Return the segment of all rows added since the last one, maybe empty; ``taps`` add to those of every row."""
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
            text=bool(rows) and len(self._committed_rows) == len(rows),
        )
        self._sent_positions[self._run] = (numbers, positions)
        self._run += 1
        self._commits = []
        committed, self._committed_rows = self._committed_rows, []
        for number in committed:
            self.commit(number)
        return segment

    def commit(self, number: int) -> None:
        """Make ``number`` text; every older uncommitted number is dead."""
        if not self.base <= number < self.next_number or self._rows:
            raise ValueError(f"cannot commit number {number}: base {self.base}, "
                             f"next {self.next_number}, {len(self._rows)} rows unsealed")
        self._commits.append(number)
        self._prune_commits.append(number)
        for decided in range(self.base, number + 1):
            self._parents.pop(decided, None)
        self.base = number + 1

    def prune(self, keep: Iterable[int]) -> Prune:
        """Return the message that, of all numbers issued, only the committed ones and ``keep`` are alive."""
        survivors = self._prune_commits + sorted(n for n in keep if n >= self.base)
        message = Prune(self.session, self.epoch, self._prune_sequence, self._prune_start,
                        self.next_number, np.array(survivors, dtype=np.int32))
        self._prune_sequence += 1
        self._prune_start, self._prune_commits = self.base, []
        return message

    def skip_prune(self) -> None:
        """Exclude all numbers below the base from later prunes (after the prompt, where all are alive)."""
        self._prune_start, self._prune_commits = self.base, []

    def pop_returned(self, run: int) -> tuple[Int32, Int32]:
        """Remove ``run`` from those in flight; its numbers and positions.  KeyError if it is not there."""
        return self._sent_positions.pop(run)

    def sent_numbers(self, run: int) -> Int32 | None:
        """Return the numbers of ``run``; None if it is not in flight."""
        positions = self._sent_positions.get(run)
        return None if positions is None else positions[0]

    @property
    def runs(self) -> int:
        """Segments that were sealed."""
        return self._run

    @property
    def in_flight(self) -> int:
        return len(self._sent_positions)
