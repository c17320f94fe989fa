"""Rows in the stages' caches: how many there may be, and which of them are kept for requests to come.

Knows texts, who came last, and counts of rows; a stage's cache rows are counted alike on all stages.
Does not know messages, nor how rows are moved or drafters made.

A session that is over leaves the rows of its text.  A request whose prompt begins with that text
begins with them, and they are its own then: one session's rows serve one other.  If rows are short,
what was left longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.messages import Int32
from flowspec_edge.runtime.coordinator import Coordinator
from flowspec_edge.runtime.request import Request

# Fewer are not worth it: a segment holds as many, and takes the time of one with a row (Params.segment).
LEAST_ROWS = 16
# A long chat is not given up for the system prompt that another one shares with it.
LEAST_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Prefix:
    """What a session that is over has left.

    session   whose rows the stages keep
    tokens    [rows] int32, of these rows
    request   that it answered
    drafter   that knows this text, and at least its first ``rows`` tokens
    """

    session: int
    tokens: Int32
    request: Request
    drafter: Drafter | None

    def shared_with(self, prompt: Sequence[int]) -> int:
        """How many tokens both begin with."""
        length = min(len(self.tokens), len(prompt))
        differ = self.tokens[:length] != np.asarray(prompt[:length], dtype=np.int64)
        return int(differ.argmax()) if differ.any() else length


@dataclass(frozen=True, eq=False)
class Reuse:
    """What a request begins with: the first ``rows`` rows of ``prefix``.  Its drafter knows one token more,
    whose feature is the first that the stages compute."""

    prefix: Prefix
    rows: int


class RowPool:
    """The rows of open sessions, as many as each may need, and those that are kept."""

    def __init__(self, limit: int | None = None) -> None:
        """``limit``: rows at a time; None: any number, and none are kept."""
        self._limit = limit
        self._open: dict[int, int] = {}  # capacities by session
        self._kept: dict[int, Prefix] = {}  # by session, the one left longest ago first

    @property
    def kept(self) -> tuple[int, ...]:
        """Sessions of which rows are kept, the one left longest ago first."""
        return tuple(self._kept)

    @property
    def rows(self) -> int:
        """That there may be at a time."""
        return sum(self._open.values()) + sum(len(prefix.tokens) for prefix in self._kept.values())

    def fits(self, rows: int) -> bool:
        """Whether a session of so many rows may begin, if need be with no others kept; alone it may
        always."""
        return self._limit is None or not self._open or sum(self._open.values()) + rows <= self._limit

    def find(self, prompt: Sequence[int], usable: Callable[[Prefix], bool]) -> Reuse | None:
        """What a request had best begin with: the most rows, of those the ones left last.

        One row less than prompt and prefix share, so that at least one is computed for it.
        """
        best: Reuse | None = None
        for prefix in self._kept.values():
            rows = prefix.shared_with(prompt) - 1
            enough = rows >= LEAST_ROWS and rows >= LEAST_SHARE * len(prefix.tokens)
            if enough and (best is None or rows >= best.rows) and usable(prefix):
                best = Reuse(prefix, rows)
        return best

    def begin(self, session: int, rows: int, after: int = -1) -> tuple[int, ...]:
        """A session of at most so many rows begins, with kept ones of session ``after`` if there is one;
        whose rows are kept from now on."""
        self._kept.pop(after, None)
        self._open[session] = rows
        while self._limit is not None and self._kept and self.rows > self._limit:
            del self._kept[next(iter(self._kept))]
        return self.kept

    def leave(self, coordinator: Coordinator) -> tuple[int, ...]:
        """A session is over and was not lost: the numbers of the rows that the stages are to keep of it.

        Empty if there are too few for any other, or its drafter cannot be handed on.
        """
        session, request, drafter = coordinator.ledger.session, coordinator.request, coordinator.drafter
        del self._open[session]
        numbers, tokens = coordinator.rows()
        if self._limit is None or len(numbers) <= LEAST_ROWS:
            return ()
        # Also gives back what the drafter holds beside the text.
        if drafter and not drafter.rewind(len(numbers), request.sampling, request.params.rank,
                                          request.params.tau):
            return ()
        self._kept[session] = Prefix(session, np.array(tokens, dtype=np.int32), request, drafter)
        return tuple(numbers)

    def clear(self) -> None:
        """Every session is over, or lost, and nothing is kept any more."""
        self._open.clear()
        self._kept.clear()
