"""D0's side of several requests at once: who goes next.

Knows in which order coordinators get V1's free slot and D0's time.  Does not know sockets or how
time passes: a driver treats this as it would treat one coordinator, and both drivers use this very
object.

The oldest request comes first, always, and the others take what it leaves free (docs/serving.md tells
what that costs it): V1 while its tokens are on their way and D0 while it has nothing to
do.  What has arrived, for whomever, comes before anybody's drafting, for it takes less time and
sets a pipeline's worth of rows free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from flowspec_edge.messages import Cancel, Close, Credit, Open, Output, Prune, Segment, Tap
from flowspec_edge.runtime.coordinator import Coordinator, Draft, Task
from flowspec_edge.runtime.pace import Pace


@dataclass(frozen=True)
class Job:
    """A piece of D0's work, and whose it is."""

    coordinator: Coordinator
    task: Task


class Sessions:
    """Coordinators by session, the oldest first."""

    def __init__(self, window: int = 1, clock: Callable[[], float] | None = None) -> None:
        """``window``: segments, of whatever session, that V1 has room for at a time; ``clock``: the driver's,
        in seconds, without which nothing is sent ahead."""
        self._window = window
        self._clock = clock
        self._pace = Pace()
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
                messages.append(self._to_v1(segment))
        return messages

    def take_ahead(self, job: Job) -> list[Segment]:
        """What goes before D0 starts on ``job``, so that V1 does not wait for the end of it: one segment
        more than V1 has room for, if the job is a draft pass that lasts longer than what is there.

        Of the oldest request alone: what a younger one had in V1's queue would be in its way.  An
        output is another matter: it tells what is worth sending, and takes little time.
        """
        if self._clock is None or not isinstance(job.task, Draft) or len(self._at_v1) != self._window:
            return []
        if not self._pace.outlasts(_kind(job), self._clock()):
            return []
        oldest = next(iter(self._open.values()))
        if oldest.strategy.sends_ahead and (segment := oldest.next_segment()):
            return [self._to_v1(segment)]
        return []

    def worked(self, job: Job, seconds: float) -> None:
        """D0 is through with ``job``."""
        self._pace.worked(_kind(job), seconds)

    def _to_v1(self, segment: Segment) -> Segment:
        self._at_v1.add((segment.session, segment.epoch, segment.run))
        if self._clock:
            self._pace.sent(len(segment.numbers), self._clock())
        return segment

    def receive(self, message: Output | Credit | Tap) -> None:
        """An arrival; cheap, the work is done by jobs.  Anything stale is ignored."""
        if isinstance(message, Credit):
            at_v1 = (message.session, message.epoch, message.run)
            if at_v1 in self._at_v1:
                self._at_v1.remove(at_v1)
                if self._clock:
                    self._pace.done(self._clock())
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


def _kind(job: Job) -> str:
    """Jobs that take alike long, as a rule: draft passes, outputs, chunks of a prompt."""
    return type(job.task).__name__
