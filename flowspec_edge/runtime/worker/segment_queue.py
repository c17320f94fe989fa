"""What has arrived over a stage's data link, and what of it may be computed next.

The stage reads the link whatever it waits for, so that its peer's connection never stands still. The data and
the control channel are not ordered: the first segments of a session may overtake its Open. They wait for it
here, and other sessions' segments pass them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowspec_edge.errors import PeerFault
from flowspec_edge.messages import Batch, Segment, parts_of
from flowspec_edge.runtime.worker.stats import WorkerStats
from flowspec_edge.transport.base import Link

_ROOM = 64  # messages; many times what an honest device has under way


@dataclass(eq=False)
class _Arrival:
    segments: Sequence[Segment]
    size: int  # bytes
    until: float  # when its sessions must be open (time.monotonic)


class SegmentQueue:
    def __init__(self, link: Link, stats: WorkerStats, open_within_s: float, in_order: bool,
                 refused: Callable[[Segment], None]) -> None:
        """open_within_s  how long segments wait for their session's Open
        in_order       nothing passes them: all ranks of a group must compute the same segments
        refused        called with the first segment of a message that is not going to be computed
        """
        self._link = link
        self._stats = stats
        self._open_within_s = open_within_s
        self._in_order = in_order
        self._refused = refused
        self._arrived: deque[_Arrival] = deque()
        self._fault: PeerFault | None = None  # the latest, not yet raised
        self._bytes_in = 0  # of the link, counted so far

    @property
    def has_room(self) -> bool:
        return len(self._arrived) < _ROOM

    def read(self) -> None:
        """Take what the link has, while there is room; wait for nothing and raise nothing."""
        try:
            while self.has_room and (message := self._link.receive()) is not None:
                parts = parts_of(message) if isinstance(message, Segment | Batch) else ()
                segments = [part for part in parts if isinstance(part, Segment)]
                if not segments:
                    self._link.reject(f"a {type(message).__name__} is not a segment")
                    continue
                size = self._link.bytes_in - self._bytes_in  # since the last one: emulated links delay
                self._bytes_in += size
                self._arrived.append(_Arrival(segments, size, time.monotonic() + self._open_within_s))
        except PeerFault as error:
            self._fault = error

    def take(self) -> Sequence[Segment]:
        """The segments of the oldest message that may be computed; empty without one. PeerFault if the peer,
        whose key was checked, broke the protocol."""
        self.read()
        if self._fault:
            fault, self._fault = self._fault, None
            raise fault
        early: list[_Arrival] = []
        held: set[int] = set()  # the sessions of those, and of messages behind them that must wait, too
        for arrival in self._arrived:
            sessions = {segment.session for segment in arrival.segments}
            if any(self._stats.awaits_open(segment.session, segment.epoch) for segment in arrival.segments):
                early.append(arrival)
                held |= sessions
            elif held.isdisjoint(sessions) and not (held and self._in_order):
                self._arrived.remove(arrival)
                self._stats.add_bytes("bytes_in", arrival.size, arrival.segments)
                return arrival.segments
            else:
                held |= sessions
        if early and time.monotonic() > early[0].until:
            self._refuse(early[0], f"within {self._open_within_s:g} s")
        elif early and not self.has_room:
            self._refuse(early[0], f"while {_ROOM} messages came")
        return ()

    def _refuse(self, arrival: _Arrival, limit: str) -> None:
        self._arrived.remove(arrival)
        session = next(segment.session for segment in arrival.segments
                       if self._stats.awaits_open(segment.session, segment.epoch))
        self._refused(arrival.segments[0])
        self._link.reject(f"received a segment of session {session}, but no Open for it {limit}")
