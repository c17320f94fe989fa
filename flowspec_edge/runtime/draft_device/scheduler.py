"""Schedules several requests on V1's slots and D0's time; used by the real-time and virtual-time drivers.

The oldest request comes first; others use the time it leaves free at V1 and D0 (cost: docs/serving.md). All
requests' outputs come before draft passes: they take less time and free a pipeline's worth of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from flowspec_edge.messages import Cancel, Close, Credit, Open, Output, Prune, Segment, Tap
from flowspec_edge.runtime.draft_device.coordinator import Coordinator, DraftPass, Task
from flowspec_edge.runtime.draft_device.send_ahead import SlotPredictor


@dataclass(frozen=True)
class Job:
    coordinator: Coordinator
    task: Task


class Scheduler:
    """Collects the coordinators' messages and tasks; passes arrivals on to them.

    turn  the coordinator that was called last: the one to blame for an exception
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """``clock``: the driver's, in seconds; None: no segment is sent ahead."""
        self._clock = clock
        self._predictor = SlotPredictor()
        self.turn: Coordinator | None = None
        self._open: dict[int, Coordinator] = {}
        self._at_v1: set[tuple[int, int, int]] = set()  # session, epoch, run

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Coordinator]:
        """Iterate over a copy: any request may be removed meanwhile."""
        return iter(list(self._open.values()))

    def add(self, coordinator: Coordinator) -> Open:
        """Add a request as the youngest; return the message that every stage needs before its segments."""
        opening = replace(coordinator.open_message(), concurrent=tuple(self._open))
        self._open[opening.session] = coordinator
        return opening

    def remove(self, session: int) -> Close:
        """Remove a request, finished or not; return the message for the stages. Its segment at V1 occupies
        the slot until V1's credit."""
        del self._open[session]
        return Close(session)

    def take_messages(self) -> list[Segment | Prune | Cancel]:
        """Return control messages, then a segment if V1 has none."""
        messages: list[Segment | Prune | Cancel] = []
        for coordinator in self._turns():
            messages += coordinator.controls()
        for coordinator in self._turns():
            if not self._at_v1 and (segment := coordinator.next_segment()):
                messages.append(self._to_v1(segment))
        return messages

    def take_ahead(self, job: Job) -> list[Segment]:
        """Return a segment to queue at V1 before D0 starts ``job``, a draft pass that outlasts V1's work.

        Only the oldest request sends ahead: a younger one's segment in V1's queue would delay it. Not before
        an output, which takes little time and shows what is worth sending.
        """
        if self._clock is None or not isinstance(job.task, DraftPass) or len(self._at_v1) != 1:
            return []
        if not self._predictor.outlasts(_kind(job), self._clock()):
            return []
        oldest = next(self._turns())
        if oldest.strategy.allows_early_send and (segment := oldest.next_segment()):
            return [self._to_v1(segment)]
        return []

    def worked(self, job: Job, seconds: float) -> None:
        self._predictor.add_duration(_kind(job), seconds)

    def _to_v1(self, segment: Segment) -> Segment:
        self._at_v1.add((segment.session, segment.epoch, segment.run))
        if self._clock:
            self._predictor.sent(len(segment.numbers), self._clock())
        return segment

    def receive(self, message: Output | Credit | Tap) -> bool:
        """Store an arrival for the jobs, without processing it; False for a stale one, which is ignored."""
        if isinstance(message, Credit):
            at_v1 = (message.session, message.epoch, message.run)
            if at_v1 not in self._at_v1:
                return False
            self._at_v1.remove(at_v1)
            if self._clock:
                self._predictor.segment_done(self._clock())
            return True
        return message.session in self._open and self._open[message.session].receive(message)

    def next_job(self) -> Job | None:
        """Return the most urgent job: outputs before draft passes, the oldest request first."""
        for coordinator in self._turns():
            if output := coordinator.next_output():
                return Job(coordinator, output)
        for coordinator in self._turns():
            if draft := coordinator.next_draft():
                return Job(coordinator, draft)
        return None

    def _turns(self) -> Iterator[Coordinator]:
        for coordinator in self._open.values():
            self.turn = coordinator
            yield coordinator


def _kind(job: Job) -> str:
    """Jobs of one kind take about the same time."""
    return type(job.task).__name__
