"""Made-up time: a clock of events, links that take time, and spans that tell who was busy when.

Knows how long a message occupies a link.  Does not know devices or what the events mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flowspec_edge.config import Profile
from flowspec_edge.messages import Message, Payload
from flowspec_edge.transport.codec import encode

SpanKind = Literal["draft", "verify", "compute"]


@dataclass(frozen=True, slots=True)
class Span:
    """A device was busy: D0 (0) drafted or verified, Vi (i) computed ``rows`` rows of ``run``.

    ``run`` is -1 for a draft pass; ``cancelled`` says that the work was broken off at ``end``.
    """

    device: int
    kind: SpanKind
    start: float  # seconds
    end: float
    run: int
    rows: int
    cancelled: bool = False
    session: int = 0


class Clock:
    """Events in order of time, then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Run ``event`` when the clock reaches ``time`` (seconds)."""
        heapq.heappush(self._events, (time, self._made, event))
        self._made += 1

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass
class Link:
    """One direction between two devices: one message at a time occupies it, in order.

    ``seconds`` says how long so many bytes occupy it, and the latency after that.  Over ``hops`` such
    links in a row a message is handed on as it comes in: it is weighed on each, and each adds its
    latency.
    """

    clock: Clock
    seconds: Callable[[int], tuple[float, float]]
    hops: int = 1
    free_at: float = 0.0
    bytes: int = 0

    def send(self, size: int, deliver: Callable[[], None]) -> None:
        """``deliver`` runs when the last of ``size`` bytes has arrived."""
        occupied, latency = self.seconds(size)
        self.free_at = max(self.free_at, self.clock.now) + occupied
        self.bytes += size * self.hops
        self.clock.at(self.free_at + latency * self.hops, deliver)


def wire_bytes(message: Message, profile: Profile) -> int:
    """What a message weighs on the wire with the profile's hidden width and element size."""
    return sum(len(frame) for frame in encode(message)) + added_bytes(message, profile)


def added_bytes(message: Message, profile: Profile) -> int:
    """How much heavier the profile's hidden states are than those that the message holds."""
    hidden: Payload | None = getattr(message, "hidden", None)
    if hidden is None:
        return 0
    values = len(hidden.array) * profile.model.hidden_width
    return values * profile.model.bytes_per_value - hidden.array.nbytes
