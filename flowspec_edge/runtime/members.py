"""Who is in the cluster, and who still answers.

Knows what the stages tell about themselves (Hello, Heartbeat, Failed) and how long silence may
last.  Does not know sockets, processes or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec_edge.errors import PeerLost, ProtocolError
from flowspec_edge.messages import PROTOCOL_VERSION, Failed, Heartbeat, Hello
from flowspec_edge.runtime.live import LiveLines

_SHOWN = 12  # hexadecimal digits of a digest, of 64


@dataclass
class _Member:
    stage: int
    hello: Hello | None = None
    there: bool = False  # it has shown since the last loss that it, and its link to the next device, work
    apart: bool = False  # it lives, but its link to the next device is down
    seen_at: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)  # of all sessions together
    closed: dict[int, dict[str, float]] = field(default_factory=dict)  # the last ones, by session


class Members:
    """The stages V1…VN by instance id, in order."""

    def __init__(self, instances: Sequence[str], dead_after: float, alike: bool = False,
                 once: bool = False, digests: Sequence[str] = ()) -> None:
        """dead_after  seconds of silence after which a member counts as lost
        alike       every member has a slice of all layers, instead of layers of its own
        once        a member that says Hello again has lost what it was told before: it counts as lost
        digests     of the shards that the members must have, in order; empty: whichever
        """
        self.instances = tuple(instances)
        self._dead_after = dead_after
        self._alike = alike
        self._once = once
        self._digests = tuple(digests)
        self._members = {instance: _Member(stage) for stage, instance in enumerate(instances, start=1)}
        self._lines = LiveLines()

    def heard(self, sender: str, message: Hello | Heartbeat | Failed, now: float) -> None:
        """A word from ``sender``; strangers, such as the former life of a stage, are ignored.

        PeerLost if the stage says that it failed, ProtocolError if it is not what it should be.
        """
        member = self._members.get(sender)
        if member is None:
            return
        if message.stage != member.stage:
            raise ProtocolError(f"{sender} says it is V{message.stage}, but it is set up as V{member.stage}")
        member.seen_at = now
        match message:
            case Hello():
                again = member.hello is not None
                self._welcome(message)
                member.hello, member.there = message, False
                if again and self._once:
                    raise PeerLost(f"V{message.stage} connected anew: it began again, or its link broke")
            case Heartbeat():
                member.apart = "apart_s" in message.counters
                member.there = member.hello is not None and not member.apart
                if "closed" in message.counters:
                    member.closed[int(message.counters["closed"])] = message.counters
                else:
                    member.counters = message.counters
                    self._lines.show(message)
            case Failed():
                member.there = False
                raise PeerLost(f"V{message.stage} failed: {message.cause}")

    def missing(self) -> list[str]:
        """The stages that have not said Hello: "V1", …"""
        return [f"V{member.stage}" for member in self._members.values() if member.hello is None]

    def absent(self) -> list[str]:
        """The stages that have not shown since :meth:`expect_all` that they can go on: "V1", "V2", …;
        if all have shown that they live, those that cannot reach the next: "V1 (cannot reach V2)"."""
        absent = [member for member in self._members.values() if not member.there]
        names = {member.stage: f"V{member.stage}" for member in self._members.values()}
        return ([names[member.stage] for member in absent if not member.apart]
                or [f"{names[member.stage]} (cannot reach {names.get(member.stage + 1, 'D0')})"
                    for member in absent])

    def expect_all(self) -> None:
        """A stage was lost: every one has to show anew that it can go on."""
        for member in self._members.values():
            member.there = member.apart = False

    def forget(self, stage: int) -> None:
        """A stage begins another life: it has yet to say Hello."""
        member = self._members[self.instances[stage - 1]]
        member.hello, member.there, member.apart = None, False, False
        member.counters = {}

    def silent(self, now: float) -> list[int]:
        """The stages that have said Hello, but nothing for too long."""
        return [m.stage for m in self._members.values() if m.hello and now - m.seen_at > self._dead_after]

    def expect_from(self, now: float) -> None:
        """Start to count silence now: while no request ran, nobody listened."""
        for member in self._members.values():
            member.seen_at = max(member.seen_at, now)

    def check(self, now: float) -> None:
        """PeerLost if a stage has been silent for too long."""
        for member in self._members.values():
            if now - member.seen_at > self._dead_after:
                raise PeerLost(f"V{member.stage} has been silent for {self._dead_after:g} s: "
                               "see whether the device is up, reachable and not out of memory")

    def counters(self) -> tuple[dict[str, float], ...]:
        """What each stage last reported on all sessions together."""
        return tuple(dict(member.counters) for member in self._members.values())

    def take_closed(self, session: int) -> tuple[dict[str, float], ...]:
        """Each stage's last report on ``session``, or what it last said at all, and forget them."""
        return tuple(dict(member.closed.pop(session, member.counters)) for member in self._members.values())

    def forget_closed(self) -> None:
        """No session is open: reports that come so late are of no use."""
        for member in self._members.values():
            member.closed.clear()

    def all_closed(self, session: int) -> bool:
        """Whether every stage has given its last report on ``session``."""
        return all(session in member.closed for member in self._members.values())

    def _welcome(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(f"V{hello.stage} speaks protocol version {hello.version}, "
                                f"D0 {PROTOCOL_VERSION}: install the same release on all devices")
        if hello.stages != len(self._members):
            raise ProtocolError(f"V{hello.stage} is set up as one of {hello.stages} stages, "
                                f"D0 knows {len(self._members)}")
        expected = self._digests[hello.stage - 1] if self._digests else hello.digest
        if hello.digest != expected:
            raise ProtocolError(f"V{hello.stage} has the shard {hello.digest[:_SHOWN]}…, expected is "
                                f"{expected[:_SHOWN]}…: bring the right one there with: flowspec deploy up")
        for other in self._members.values():
            if other.hello is None or other.stage not in (hello.stage - 1, hello.stage + 1):
                continue
            first, second = sorted((hello, other.hello), key=lambda h: h.stage)
            if self._alike:
                if first.layers != second.layers:
                    raise ProtocolError(f"V{first.stage} has slices of layers {_range(first)}, but "
                                        f"V{second.stage} of {_range(second)}: do both have the same model?")
            elif first.layers[1] != second.layers[0]:
                raise ProtocolError(f"V{first.stage} ends at layer {first.layers[1]}, "
                                    f"but V{second.stage} starts at {second.layers[0]}: "
                                    "do both have the same model?")


def _range(hello: Hello) -> str:
    return f"[{hello.layers[0]}, {hello.layers[1]})"
