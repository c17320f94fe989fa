"""Prefix cache: which ended sessions' rows the stages retain, and which request reuses them.

A request whose prompt starts with a retained text takes over its rows, so they serve one request only.
Eviction is least recently retained first. Row counts are the same for all stages.

A prefix can be cut only where every kind of layer can go on: one with a window or a state does not hold the
whole text (``stage.layers.kinds.reusable``).  They keep a snapshot of the prompt's end, at which a chat goes
on whose template leaves out what the model reasoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from flowspec_edge.d0.request import Request
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.messages import Int32
from flowspec_edge.stage.layers.stage_cache import CacheKind, reusable

# Fewer rows save no time: a segment of this many takes as long as a single row (Params.segment).
MIN_ROWS = 16
# A request that shares only a long chat's system prompt must not use up the chat's rows: it has to share this
# part of them, or the whole prompt except for the last tokens, which a template may put before the newest
# answer alone.
MIN_SHARE = 0.5
_NEWEST_ANSWER = 4


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The retained rows of an ended session: ``tokens`` int32 [rows], all read by ``drafter``.

    text      rows of its text that a stage may have had when it ended, at least as many
    snapshot  rows of its prompt after which the stages kept a snapshot
    """

    session: int
    tokens: Int32
    request: Request
    drafter: Drafter | None
    text: int
    snapshot: int

    def shared_with(self, prompt: Sequence[int]) -> int:
        length = min(len(self.tokens), len(prompt))
        differ = self.tokens[:length] != np.asarray(prompt[:length], dtype=np.int64)
        return int(differ.argmax()) if differ.any() else length


@dataclass(frozen=True, eq=False)
class PrefixHit:
    """A request reuses the first ``rows`` rows of ``prefix``.

    Its drafter has read one token more, whose feature is the first that the stages compute.
    """

    prefix: CachedPrefix
    rows: int


class PrefixCache:
    """Counts the rows of open sessions, at their capacities, and of retained prefixes."""

    def __init__(self, limit: int | None = None) -> None:
        """Set up an empty cache; ``limit``: rows at a time; None: no limit, and no rows are retained."""
        self._limit = limit
        self._most: int | None = None
        self._reusable: Callable[[int, int, int], int] = lambda text, most, snapshot: most
        self._open: dict[int, int] = {}  # capacities by session
        self._retained: dict[int, CachedPrefix] = {}  # by session, the oldest first

    def suit(self, kinds: Sequence[CacheKind], most: int) -> None:
        """Set the cache up for a model whose layers are of ``kinds``.

        It has at most ``most`` sessions and prefixes at a time where each takes memory whatever its length.
        """
        self._reusable = partial(reusable, kinds)
        self._most = most if any(kind.takes_memory_each for kind in kinds) else None

    @property
    def retained(self) -> tuple[int, ...]:
        """Sessions whose rows are retained, the oldest first."""
        return tuple(self._retained)

    @property
    def rows(self) -> int:
        return sum(self._open.values()) + sum(len(prefix.tokens) for prefix in self._retained.values())

    def fits(self, rows: int) -> bool:
        """Return whether ``rows`` more rows fit, after evictions if necessary; a lone session always fits."""
        return self._limit is None or not self._open or sum(self._open.values()) + rows <= self._limit

    def find(self, prompt: Sequence[int], usable: Callable[[CachedPrefix], bool]) -> PrefixHit | None:
        """Return the prefix with the most rows in common, the newest of equal ones.

        The hit has at least one row less than prompt and prefix share, so that one is left to compute.
        """
        best: PrefixHit | None = None
        for prefix in self._retained.values():
            shared = prefix.shared_with(prompt)
            rows = self._reusable(prefix.text, shared - 1, prefix.snapshot)
            enough = (rows >= MIN_SHARE * len(prefix.tokens)
                      or shared >= len(prefix.request.prompt) - _NEWEST_ANSWER)
            if enough and rows >= MIN_ROWS and (best is None or rows >= best.rows) and usable(prefix):
                best = PrefixHit(prefix, rows)
        return best

    def begin(self, session: int, rows: int, parent_session: int = -1) -> tuple[int, ...]:
        """Begin a session of at most ``rows`` rows, which takes over those of ``parent_session``.

        Return the sessions whose rows the stages still retain.
        """
        self._retained.pop(parent_session, None)
        self._open[session] = rows
        while self._limit is not None and self._retained and (
                self.rows > self._limit or len(self._open) + len(self._retained) > (self._most or inf)):
            del self._retained[next(iter(self._retained))]
        return self.retained

    def retain(self, draft_session: DraftSession) -> tuple[int, ...]:
        """End a session; return the numbers of its rows that the stages retain.

        Empty if too few can be used again, or its drafter cannot. Not for a session whose stages were lost.
        """
        session, request = draft_session.builder.session, draft_session.request
        drafter = draft_session.drafter
        del self._open[session]
        numbers, tokens = draft_session.retainable_rows()
        text, snapshot = draft_session.text_rows, draft_session.snapshot
        if self._limit is None or self._reusable(text, len(numbers), snapshot) <= MIN_ROWS:
            return ()
        # Also frees what the drafter holds beyond the text.
        if drafter and not drafter.rewind(len(numbers), request.sampling, request.params.rank,
                                          request.params.tau):
            return ()
        self._retained[session] = CachedPrefix(session, np.array(tokens, dtype=np.int32), request, drafter,
                                               text, snapshot)
        return tuple(numbers)

    def drop(self, session: int) -> None:
        """End a session of which nothing is retained."""
        del self._open[session]

    def clear(self) -> None:
        self._open.clear()
        self._retained.clear()
