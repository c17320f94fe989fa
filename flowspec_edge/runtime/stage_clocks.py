"""Stages' clocks, told in D0's.

Every board's monotonic clock begins somewhere else.  A message says when it left by its stage's clock;
it arrives a little later by D0's, never earlier.  So the smallest difference seen is the best guess of
how far the clocks are apart.  It is too large by the quickest message's way, which is far below a
segment's time: what a stage did is shown later than it was by so much, and never before its cause.
"""

from __future__ import annotations

from flowspec_edge.messages import Computed


class StageClocks:
    """Differences by stage, learned from the messages themselves."""

    def __init__(self, forget: float = 0.0) -> None:
        """``forget``: seconds by which a guess yields with every message, since clocks drift."""
        self._forget = forget
        self._ahead: dict[int, float] = {}  # D0's clock minus the stage's, seconds

    def learn(self, message: Computed, at: float) -> None:
        """A message came ``at`` that moment of D0's clock, in seconds."""
        seen = at - message.sent * 1e-6
        self._ahead[message.stage] = min(seen, self._ahead.get(message.stage, seen) + self._forget)

    def times(self, message: Computed) -> tuple[float, float]:
        """When the work began and ended, in seconds of D0's clock, which a stage of which nothing was
        learned is taken to share."""
        ahead = self._ahead.get(message.stage, 0.0)
        return message.start * 1e-6 + ahead, message.end * 1e-6 + ahead
