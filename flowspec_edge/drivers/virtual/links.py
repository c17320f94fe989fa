"""Message sizes and link occupancy in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowspec_edge.device_profile import Profile
from flowspec_edge.drivers.virtual.clock import EventClock
from flowspec_edge.messages import Batch, Message, Payload
from flowspec_edge.transport.codec import encode


@dataclass
class VirtualLink:
    """One direction between two devices; messages occupy it one at a time, in order.

    seconds  bytes -> (time that they occupy the link, latency after that)
    hops     consecutive cut-through links: each counts the bytes and adds its latency
    """

    clock: EventClock
    seconds: Callable[[int], tuple[float, float]]
    hops: int = 1
    free_at: float = 0.0
    bytes: int = 0

    def send(self, size: int, deliver: Callable[[], None]) -> None:
        """Send ``size`` bytes; ``deliver`` runs when the last of them has arrived."""
        occupied, latency = self.seconds(size)
        self.free_at = max(self.free_at, self.clock.now) + occupied
        self.bytes += size * self.hops
        self.clock.at(self.free_at + latency * self.hops, deliver)


def wire_bytes(message: Message, profile: Profile) -> int:
    """Return a message's bytes on the wire with the profile's hidden width and element size."""
    return sum(len(frame) for frame in encode(message)) + added_bytes(message, profile)


def added_bytes(message: Message, profile: Profile) -> int:
    """How many more bytes the profile's hidden states have than those in the message."""
    if isinstance(message, Batch):
        return sum(added_bytes(part, profile) for part in message.parts)
    hidden: Payload | None = getattr(message, "hidden", None)
    if hidden is None:
        return 0
    values = len(hidden.array) * profile.model.hidden_width
    return values * profile.model.bytes_per_value - hidden.array.nbytes
