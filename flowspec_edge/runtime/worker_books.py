"""What a stage's loop counts: of each open session, and of all of them together.

Knows what is reported beside an engine's own counters.  Does not know messages or who reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

_NEWEST = 1024


@dataclass(eq=False)
class Share:
    """One session's, or everybody's."""

    compute_s: float = 0.0
    wait_s: float = 0.0  # that the stage had nothing to do since the session was opened
    tokens: int = 0  # committed
    rows: int = 0  # that went through the layers
    bytes_in: int = 0  # over the data links
    bytes_out: int = 0
    slots: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))  # s, segments with rows

    def counters(self) -> dict[str, float]:
        """For a Heartbeat; ``slot_s`` is the median segment's."""
        return {"compute_s": self.compute_s, "wait_s": self.wait_s,
                "slot_s": median(self.slots) if self.slots else 0.0, "tokens": self.tokens, "rows": self.rows,
                "bytes_in": self.bytes_in, "bytes_out": self.bytes_out}


class Books:
    """Shares by session; ``total`` is that of all since one was opened that had no other beside it, the
    session ``since``."""

    def __init__(self) -> None:
        self.total = Share()
        self.since = -1
        self._newest = -1  # session
        self._epochs: dict[int, int] = {}
        self._shares: dict[int, Share] = {}
        self._timed: set[int] = set()

    def __bool__(self) -> bool:
        """Whether a session is open."""
        return bool(self._epochs)

    def __contains__(self, session: int) -> bool:
        return session in self._epochs

    @property
    def sessions(self) -> tuple[int, ...]:
        """The open ones, the one opened first first."""
        return tuple(self._epochs)

    def open(self, session: int, epoch: int, beside: Iterable[int], timed: bool = False) -> bool:
        """A session begins, and those that are not ``beside`` it are over; whether it is the only one.

        ``timed``: see :meth:`timed`.  An epoch that is no newer than the session's changes nothing.
        """
        if self._epochs.get(session, -1) >= epoch:
            return False
        self._newest = max(self._newest, session)
        stay = set(beside) - {session}
        self._epochs = {n: e for n, e in self._epochs.items() if n in stay}
        self._shares = {n: share for n, share in self._shares.items() if n in stay}
        alone = not self._epochs
        if alone:
            self.total, self.since = Share(), session
        self._epochs[session] = epoch
        self._shares[session] = Share()
        self._timed = (self._timed & stay) | ({session} if timed else set())
        return alone

    def close(self, session: int) -> None:
        """A session is over; ``total`` keeps what it did."""
        del self._epochs[session], self._shares[session]
        self._timed.discard(session)

    def timed(self, session: int) -> bool:
        """Whether D0 wants to hear of each of an open session's segments (Computed)."""
        return session in self._timed

    def skip(self, session: int) -> None:
        """A session is over that was never opened here: nor will be any before it."""
        self._newest = max(self._newest, session)

    def expected(self, session: int, epoch: int) -> bool:
        """Whether the Open is still to come: sessions are opened in the order of their numbers."""
        return session > self._newest or self._epochs.get(session, epoch) < epoch

    def shares(self, session: int) -> list[Share]:
        """Where something done for a session is booked; one that is over has no share of its own."""
        own = self._shares.get(session)
        return [self.total] if own is None else [self.total, own]

    def waited(self, seconds: float) -> None:
        """The stage had nothing to do: for any of the open sessions."""
        for share in [self.total, *self._shares.values()] if self else ():
            share.wait_s += seconds
