"""D0's side of several requests at once: who goes next.

Knows in which order coordinators get V1's free slot and D0's time.  Does not know sockets or how
time passes: a driver treats this as it would treat one coordinator, and both drivers use this very
object.

The oldest request comes first, always: its latency is nearly what it would be alone, and the
others take what it leaves free, V1 while its tokens are on their way and D0 while it has nothing to
do.  What has arrived, for whomever, comes before anybody's drafting, for it takes less time and
sets a pipeline's worth of rows free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowspec_edge.messages import Cancel, Close, Credit, Open, Output, Prune, Segment, Tap
from flowspec_edge.runtime.coordinator import Coordinator, Task


@dataclass(frozen=True)
class Job:
    """A piece of D0's work, and whose it is."""

    coordinator: Coordinator
    task: Task


class Sessions:
    """Coordinators by session, the oldest first."""

    def __init__(self, window: int = 1) -> None:
        """``window``: segments, of whatever session, that may be at V1 at a time."""
        self._window = window
        self._open: dict[int, Coordinator] = {}
        self._at_v1: set[tuple[int, int, int]] = set()  # session, epoch, run

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Coordinator]:
        """Those that are open; any may be removed meanwhile."""
        return iter(list(self._open.values()))

    def add(self, coordinator: Coordinator) -> Open:
        """Take in a request, the youngest; what every stage has to see before its segments."""
        opening = replace(coordinator.open_message(), beside=tuple(self._open))
        self._open[opening.session] = coordinator
        return opening

    def remove(self, session: int) -> Close:
        """Forget a request, finished or not; what is to be told to the stages.

        A segment of it that is at V1 stays there until V1 has told so.
        """
        del self._open[session]
        return Close(session)

    def take_messages(self) -> list[Segment | Prune | Cancel]:
        """Everything that may be sent now: control messages, then segments if V1 has room."""
        messages: list[Segment | Prune | Cancel] = []
        for coordinator in self._open.values():
            messages += coordinator.controls()
        for coordinator in self._open.values():
            while len(self._at_v1) < self._window and (segment := coordinator.next_segment()):
                self._at_v1.add((segment.session, segment.epoch, segment.run))
                messages.append(segment)
        return messages

    def receive(self, message: Output | Credit | Tap) -> None:
        """An arrival; cheap, the work is done by jobs.  Anything stale is ignored."""
        if isinstance(message, Credit):
            self._at_v1.discard((message.session, message.epoch, message.run))
        elif message.session in self._open:
            self._open[message.session].receive(message)

    def next_job(self) -> Job | None:
        """The most urgent work."""
        for coordinator in self._open.values():
            if output := coordinator.next_output():
                return Job(coordinator, output)
        for coordinator in self._open.values():
            if draft := coordinator.next_draft():
                return Job(coordinator, draft)
        return None
