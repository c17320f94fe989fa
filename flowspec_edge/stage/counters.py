"""What a stage's sessions have cost, each and in total."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from flowspec_edge.messages import Output, Segment, shares

_NEWEST = 1024


@dataclass(eq=False)
class SessionCounters:
    epoch: int = 0
    timed: bool = False  # D0 wants a Computed for each segment
    compute_s: float = 0.0
    wait_s: float = 0.0  # idle while the session was open
    tokens: int = 0  # committed
    rows: int = 0  # that went through the layers
    bytes_in: int = 0  # over the data links
    bytes_out: int = 0
    late_s: float | None = None  # under emulation: by how much this machine's compute exceeded the profile's
    slots: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))  # s, segments with rows

    def add(self, counter: Literal["bytes_in", "bytes_out"], size: int) -> None:
        setattr(self, counter, getattr(self, counter) + size)

    def counters(self) -> dict[str, float]:
        """Return the counters of a heartbeat; ``slot_s`` is the median over segments."""
        late = {} if self.late_s is None else {"late_s": self.late_s}
        return {**late, "compute_s": self.compute_s, "wait_s": self.wait_s,
                "slot_s": median(self.slots) if self.slots else 0.0, "tokens": self.tokens, "rows": self.rows,
                "bytes_in": self.bytes_in, "bytes_out": self.bytes_out}


class StageCounters:
    """Counters of a stage's sessions.

    total   over all sessions since ``since``, the last one opened while no other was open
    newest  highest session number opened or skipped so far
    """

    def __init__(self) -> None:
        self.total = SessionCounters()
        self.since = -1
        self.newest = -1
        self._stats: dict[int, SessionCounters] = {}  # of the open sessions

    def __bool__(self) -> bool:
        """Whether a session is open."""
        return bool(self._stats)

    def __contains__(self, session: int) -> bool:
        return session in self._stats

    @property
    def sessions(self) -> tuple[int, ...]:
        """The open ones, oldest first."""
        return tuple(self._stats)

    def open(self, session: int, epoch: int, concurrent: Iterable[int], timed: bool = False) -> bool:
        """Open a session and close those not ``concurrent``; return whether it is the only open one.

        An epoch no newer than the session's changes nothing.
        """
        if session in self._stats and self._stats[session].epoch >= epoch:
            return False
        self.newest = max(self.newest, session)
        stay = set(concurrent) - {session}
        self._stats = {n: stats for n, stats in self._stats.items() if n in stay}
        alone = not self._stats
        if alone:
            self.total, self.since = SessionCounters(), session
        self._stats[session] = SessionCounters(epoch, timed)
        return alone

    def close(self, session: int) -> None:
        """Close a session; ``total`` keeps its counts."""
        del self._stats[session]

    def timed(self, session: int) -> bool:
        return session in self._stats and self._stats[session].timed

    def mark_ended(self, session: int) -> None:
        """Note that a session ended before its Open came; neither it nor an earlier one will be opened."""
        self.newest = max(self.newest, session)

    def awaits_open(self, session: int, epoch: int) -> bool:
        """Return whether the Open is still to come: sessions are opened in numerical order."""
        return session > self.newest or (session in self._stats and self._stats[session].epoch < epoch)

    def counters(self, session: int) -> dict[str, float]:
        """Return an open session's counters."""
        return self._stats[session].counters()

    def add_bytes(self, counter: Literal["bytes_in", "bytes_out"], size: int,
                  parts: Sequence[Segment | Output]) -> None:
        """Count ``size`` bytes of a message in total, and for the sessions of its parts by their rows."""
        self.total.add(counter, size)
        for part, share in zip(parts, shares(size, parts), strict=True):
            if part.session in self._stats:
                self._stats[part.session].add(counter, share)

    def add_pass(self, seconds: float, segments: Sequence[Segment], rows: Mapping[int, int]) -> None:
        """Count a pass, for each of its sessions in full; ``rows``: by session."""
        by_session = [(self._stats.get(s.session), len(s.committed), rows[s.session]) for s in segments]
        sums = self.total, sum(tokens for _, tokens, _ in by_session), sum(count for *_, count in by_session)
        computed = any(len(segment.numbers) for segment in segments)
        for stats, tokens, count in [sums, *by_session]:
            if stats is not None:
                stats.compute_s += seconds
                stats.tokens += tokens
                stats.rows += count
                if computed:
                    stats.slots.append(seconds)

    def add_late(self, seconds: float, segments: Sequence[Segment]) -> None:
        for stats in [self.total, *(self._stats.get(segment.session) for segment in segments)]:
            if stats is not None:
                stats.late_s = (stats.late_s or 0.0) + seconds

    def add_wait(self, seconds: float) -> None:
        """Count idle time for all open sessions."""
        for stats in [self.total, *self._stats.values()] if self else ():
            stats.wait_s += seconds
