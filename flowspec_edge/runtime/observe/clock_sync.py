"""Maps the stages' clocks to D0's.

Every board's monotonic clock has its own origin. A message has its departure time on the stage's clock, and
arrives later on D0's, so the smallest difference seen estimates the offset. The estimate is too large by the
fastest message's latency, far below a segment's time: work appears that much late, never before its cause.
"""

from __future__ import annotations

from flowspec_edge.messages import Computed


class StageClocks:
    def __init__(self, forget: float = 0.0) -> None:
        """``forget``: seconds added to the estimate with every message, because clocks drift."""
        self._forget = forget
        self._offset: dict[int, float] = {}  # D0's clock minus the stage's, seconds

    def learn(self, message: Computed, at: float) -> None:
        """A message arrived ``at`` seconds of D0's clock."""
        seen = at - message.sent * 1e-6
        self._offset[message.stage] = min(seen, self._offset.get(message.stage, seen) + self._forget)

    def times(self, message: Computed) -> tuple[float, float]:
        """Return start and end of the work in seconds of D0's clock; unknown stages share that clock."""
        offset = self._offset.get(message.stage, 0.0)
        return message.start * 1e-6 + offset, message.end * 1e-6 + offset
