"""Stages' clocks, told in D0's.

Every board's monotonic clock begins somewhere else.  A message says when it left by its stage's clock;
it arrives a little later by D0's, never earlier.  So the smallest difference seen is the best guess of
how far the clocks are apart: too large by the fastest message's way, which is far below a segment's time.
"""

from __future__ import annotations

from flowspec_edge.messages import Computed

_FORGET = 1e-5  # seconds by which the guess yields with every message, since clocks drift


class StageClocks:
    """Differences by stage, learned from the messages themselves."""

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}  # D0's clock minus the stage's, seconds

    def times(self, message: Computed, at: float) -> tuple[float, float]:
        """When the work began and ended, in seconds of D0's clock; ``at``: when the message came."""
        seen = at - message.sent * 1e-6
        ahead = min(seen, self._ahead.get(message.stage, seen) + _FORGET)
        self._ahead[message.stage] = ahead
        return message.start * 1e-6 + ahead, message.end * 1e-6 + ahead
