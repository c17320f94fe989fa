"""When the first stage falls free, and whether D0 will be deaf then: judged by what both took before.

A strategy cuts a segment at the last moment, when the first stage has a free slot.  But D0 cannot send
while it computes, and a draft pass may last a fifth of a slot at four stages and more than half of one
at fourteen.  So that the pipeline does not wait for it, a segment may go *ahead*, into the queue of the
first stage, just before a pass that would outlast the segment there.

Knows moments and durations, in seconds of whatever clock the driver has; does not know what a segment
or a pass is for.  Judges from the newest few durations of each kind, so it needs no profile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

_KEPT = 9  # durations of a kind
_PLACE = 2  # of the shortest of them: late news lengthen a duration, and a pruned segment takes no time


class Pace:
    """Durations of pieces of work by kind, and since when the first stage has been at its segment."""

    def __init__(self) -> None:
        self._took: dict[Hashable, deque[float]] = {}
        self._queue: list[tuple[int, float]] = []  # at V1, in order: rows, and when it could begin at best

    def worked(self, kind: Hashable, seconds: float) -> None:
        """A piece of work of this kind has taken so long."""
        self._took.setdefault(kind, deque(maxlen=_KEPT)).append(seconds)

    def seconds(self, kind: Hashable) -> float | None:
        """What a piece of work of this kind will take; None if there was none yet."""
        took = self._took.get(kind)
        return sorted(took)[min(_PLACE, len(took) - 1)] if took else None

    def sent(self, rows: int, now: float) -> None:
        """A segment is on its way to V1."""
        self._queue.append((rows, now))

    def done(self, now: float) -> None:
        """V1 is through with the segment that has been there longest, as D0 hears now."""
        rows, begun = self._queue.pop(0)
        expected = self.seconds(_size(rows))
        self.worked(_size(rows), now - begun)
        if self._queue:
            # What was queued began when V1 was free; D0 may have been too busy to hear of that at once.
            free = now if expected is None else min(now, begun + expected)
            following, sent = self._queue[0]
            self._queue[0] = following, max(sent, free)

    def outlasts(self, kind: Hashable, now: float) -> bool:
        """Whether a piece of D0's work that starts now ends after V1 has run out of segments.

        Only for one segment at V1; False as long as too little is known.
        """
        if len(self._queue) != 1:
            return False
        rows, begun = self._queue[0]
        there, here = self.seconds(_size(rows)), self.seconds(kind)
        return there is not None and here is not None and begun + there < now + here


def _size(rows: int) -> tuple[str, int]:
    """Segments of alike length are of one kind."""
    return "rows", rows.bit_length()
