"""What drivers and D0's core say to each other: a driver feeds events, and the core answers with actions.

    core.queue.put(handle)              # from any thread: a request asks for a place
    core.feed(event)                    # an arrival, Worked, Reported, Lost, Back, Abandoned
    match core.next():
        case Send(messages): …          # to V1 (Segment, Batch), or to every stage (the others)
        case Compute() as run: …            # run.work(), then feed Worked
        case Finish(session): …         # feed Reported with the figures that are there
        case Wait(): …                  # nothing to do until the next event

An arrival is a stage's message as it came: Output, Credit, Tap, Computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowspec_edge.d0.counters import HeartbeatCounters
from flowspec_edge.d0.jobs import Job
from flowspec_edge.messages import (
    Batch,
    Cancel,
    Close,
    Computed,
    Credit,
    Open,
    Output,
    Prune,
    Segment,
    Tap,
)

Outgoing = Open | Close | Prune | Cancel | Segment | Batch

# ---- events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A stage's times, for those who observe the request; they teach the curve nothing."""

    times: Computed


@dataclass(frozen=True)
class Learned:
    """A stage's times, for the curve alone; the request may have ended meanwhile."""

    times: Computed


@dataclass(frozen=True)
class Worked:
    """The work of the last Compute is done; it took from ``start`` to ``end``, in seconds.

    ``late_s``: by how much it exceeded the emulated time.
    """

    start: float
    end: float
    late_s: float = 0.0


@dataclass(frozen=True)
class Reported:
    """The stages' figures of a session that is being closed.

    All stages have reported, or the core asked for the reports that have come (Finish).

    stages  final counters, by stage
    slot_s  time of one segment in the slowest stage; 0: as the stages report
    energy  D0's (``SessionEnergy.close``)
    """

    session: int
    stages: Sequence[HeartbeatCounters]
    slot_s: float = 0.0
    energy: HeartbeatCounters | None = None


@dataclass(frozen=True)
class Lost:
    """A stage is lost: requests wait until all stages are back, without sessions."""

    reason: str


@dataclass(frozen=True)
class Back:
    """All stages are there again."""


@dataclass(frozen=True, eq=False)
class Abandoned:
    """Every request that has begun and whose answer is incomplete ends with ``error``.

    No other one begins before the next Wait.
    """

    error: BaseException


Event = Output | Credit | Tap | Computed | Shown | Learned | Worked | Reported | Lost | Back | Abandoned

# ---- actions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send these messages in this order."""

    messages: Sequence[Outgoing]


@dataclass(frozen=True, eq=False)
class Compute:
    """Call ``work``, which does ``job`` without the requests that have ended by then, and feed Worked."""

    job: Job
    work: Callable[[], None]


@dataclass(frozen=True)
class Finish:
    """Feed Reported for this session now, with what has come: the rest is late or lost."""

    session: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do before the next event, or before the queue changes or a handle is cancelled."""


Action = Send | Compute | Finish | Wait
