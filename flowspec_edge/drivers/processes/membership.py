"""Which stages of a cluster are alive: Hello, heartbeats, session reports, silence.

Lost stages raise PeerLost here and in ``stage_links``; ``recovery`` handles it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from flowspec_edge.d0.counters import LiveLines
from flowspec_edge.d0.prompt_chunks import MOST
from flowspec_edge.errors import PeerLost, ProtocolError
from flowspec_edge.messages import (
    PROTOCOL_VERSION,
    SAME_RELEASE,
    Computed,
    Credit,
    Failed,
    Heartbeat,
    Hello,
    Message,
    SessionReport,
    Tap,
)

_SHOWN = 12  # hexadecimal digits of a digest, of 64
_MAX_SESSION = 2**62  # far above any clock's milliseconds, with which session numbers begin


class StageBroken(PeerLost):
    """A stage that has the right key broke the protocol, so its process has to be replaced."""

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(stage, reason)
        self.stage = stage

    def __str__(self) -> str:
        return f"V{self.stage} broke the protocol: {self.args[1]}"


class StageState(Enum):
    """A stage's state as seen since the start, its last Hello, or the last outage."""

    ABSENT = auto()  # it has sent no heartbeat since then
    ISOLATED = auto()  # it is alive, but its link to the next device is down
    READY = auto()  # it is alive and connected


@dataclass
class _Member:
    stage: int
    hello: Hello | None = None
    state: StageState = StageState.ABSENT
    last_seen_at: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)  # of all sessions together
    reports: dict[int, dict[str, float]] = field(default_factory=dict)  # final counters by session


class Membership:
    """The stages V1…VN, in order, by instance id."""

    def __init__(self, instances: Sequence[str], dead_after: float,
                 fail_on_rejoin: bool = False, digests: Sequence[str] = ()) -> None:
        """Expect a Hello of each stage.

        dead_after       seconds of silence after which a stage counts as lost
        fail_on_rejoin   a second Hello counts as a loss, because the stage has lost its sessions
        digests          expected digests of the stages' shards, in order; empty: any
        """
        self.instances = tuple(instances)
        self._dead_after = dead_after
        self._fail_on_rejoin = fail_on_rejoin
        self._digests = tuple(digests)
        self._members = {instance: _Member(stage) for stage, instance in enumerate(instances, start=1)}
        self._lines = LiveLines()

    def receive(self, sender: str, message: Hello | Heartbeat | SessionReport | Failed, now: float) -> None:
        """Process a message that :meth:`objection` admits.

        PeerLost if the stage failed or, with ``fail_on_rejoin``, restarted; ProtocolError if the stage is set up
        wrongly.
        """
        member = self._members[sender]
        member.last_seen_at = now
        match message:
            case Hello():
                again = member.hello is not None
                self._check_hello(message)
                member.hello, member.state = message, StageState.ABSENT
                if again and self._fail_on_rejoin:
                    raise PeerLost(f"V{message.stage} connected again: it was restarted, or its link broke")
            case Heartbeat(counters=counters, isolated=isolated):
                if isolated:
                    member.state = StageState.ISOLATED
                else:
                    member.state = StageState.READY if member.hello else StageState.ABSENT
                member.counters = counters
                self._lines.show(message)
            case SessionReport(session=session, counters=counters):
                member.reports[session] = counters
            case Failed():
                member.state = StageState.ABSENT
                raise PeerLost(f"V{message.stage} failed: {message.cause}")

    def objection(self, sender: str, message: Message) -> str:
        """Why a message on the control channel cannot come from the stage ``sender``; "" if it can."""
        member = self._members[sender]
        match message:
            case Hello(stage=n) | Heartbeat(stage=n) | SessionReport(stage=n) | Failed(stage=n) | Computed(
                    stage=n) if n != member.stage:
                return f"it says it is V{n}, but it is set up as V{member.stage}"
            case Hello(newest=newest) if newest > _MAX_SESSION:
                return f"it knows a session {newest}, which no draft device has reached"
            case Credit() if member.stage != 1:
                return "only V1 gives credits"
            case Hello() | Heartbeat() | SessionReport() | Failed() | Credit() | Tap() | Computed():
                return ""
        return f"a {type(message).__name__} is not a stage's"

    @property
    def newest(self) -> int:
        """The highest session number that any stage reported in its last Hello; -1 if none has."""
        return max((m.hello.newest for m in self._members.values() if m.hello), default=-1)

    @property
    def accepted_prompt_rows(self) -> int:
        """Rows of a prompt's segment that every stage takes."""
        return min((MOST, *(m.hello.rows for m in self._members.values() if m.hello)))

    def missing(self) -> list[str]:
        return [f"V{member.stage}" for member in self._members.values() if member.hello is None]

    def absent(self) -> list[str]:
        """Return the absent stages, ["V1", …], or else the isolated ones, ["V1 (cannot reach V2)", …]."""
        absent, isolated = [], []
        for member in self._members.values():
            match member.state:
                case StageState.ABSENT:
                    absent.append(f"V{member.stage}")
                case StageState.ISOLATED:
                    following = f"V{member.stage + 1}" if member.stage < len(self._members) else "D0"
                    isolated.append(f"V{member.stage} (cannot reach {following})")
        return absent or isolated

    def in_state(self, state: StageState) -> set[int]:
        return {member.stage for member in self._members.values() if member.state is state}

    def expect_all(self) -> None:
        """Require every stage to show again, after a loss, that it is ready."""
        for member in self._members.values():
            member.state = StageState.ABSENT

    def forget(self, stage: int) -> None:
        """Reset a stage that is being restarted and will say Hello."""
        member = self._members[self.instances[stage - 1]]
        member.hello, member.state, member.counters = None, StageState.ABSENT, {}

    def silent(self, now: float) -> list[int]:
        """Return the stages that said Hello, but nothing for ``dead_after`` seconds."""
        return [m.stage for m in self._members.values() if m.hello and now - m.last_seen_at > self._dead_after]

    def reset_silence(self, now: float) -> None:
        """Count silence from ``now``, because no messages were read while no request ran."""
        for member in self._members.values():
            member.last_seen_at = max(member.last_seen_at, now)

    def check(self, now: float, stages: Collection[int] = ()) -> None:
        """Raise PeerLost if a stage (one of ``stages``, if any are given) has been silent for too long."""
        for member in self._members.values():
            if (not stages or member.stage in stages) and now - member.last_seen_at > self._dead_after:
                raise PeerLost(f"V{member.stage} has been silent for {self._dead_after:g} s: "
                               "check that the device is up, reachable and not out of memory")

    def all_reported(self, session: int) -> bool:
        return all(session in member.reports for member in self._members.values())

    def take_reports(self, session: int) -> tuple[dict[str, float], ...]:
        """Remove and return each stage's report on ``session``, or else the last heartbeat's counters."""
        return tuple(dict(member.reports.pop(session, member.counters)) for member in self._members.values())

    def drop_reports(self) -> None:
        for member in self._members.values():
            member.reports.clear()

    def _check_hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(f"V{hello.stage} speaks protocol version {hello.version}, "
                                f"D0 {PROTOCOL_VERSION}: {SAME_RELEASE}")
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
            if first.layers[1] != second.layers[0]:
                raise ProtocolError(f"V{first.stage} ends at layer {first.layers[1]}, "
                                    f"but V{second.stage} starts at {second.layers[0]}: "
                                    "do both have the same model?")
