"""Schedules several requests on V1's slots and D0's time; used by the real-time and virtual-time drivers.

Requests share V1's slots: a batch has rows of all requests that have any to send.  Their outputs come back
together, and are verified in one job; draft passes that can be shared are one job, too.  D0 verifies outputs
before it drafts, because verifying takes less time and frees a pipeline's worth of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TypeVar

from flowspec_edge.d0.jobs import Job, can_share
from flowspec_edge.d0.request import SchedulingPolicy
from flowspec_edge.d0.row_shares import (
    divide,
    divide_in_order,
    fair_weights,
    prompt_rows_beside,
)
from flowspec_edge.d0.session import DraftSession, Task
from flowspec_edge.messages import (
    MAX_BATCH,
    Batch,
    Cancel,
    Close,
    Credit,
    Open,
    Output,
    Prune,
    Segment,
    Tap,
    batch_of,
)
from flowspec_edge.strategies.slot_worth import SlotWorth

_MOST_ROWS = 256  # of a batch, unless one segment is longer
_NEWEST = 9  # durations that are kept of each kind of work
# The estimate is this element of the sorted durations: a late credit makes a duration too long, and a pruned
# segment takes no time.
_RANK = 2
T = TypeVar("T")


class SlotPredictor:
    """Predicts when V1 becomes idle, from the most recent durations of each kind of work, in seconds.

    A strategy builds a segment at the last moment, when V1 has a free slot. But D0 cannot send while it
    computes, and a draft pass takes a fifth of a slot at four stages, and more than half of a slot at
    fourteen. So before a pass that would outlast V1's current segment, D0 queues the next one at V1 *ahead*.
    """

    def __init__(self) -> None:
        self._durations: dict[Hashable, deque[float]] = {}
        self._queue: list[tuple[int, float]] = []  # at V1, in order: rows, and the earliest start

    def add_duration(self, kind: Hashable, seconds: float) -> None:
        self._durations.setdefault(kind, deque(maxlen=_NEWEST)).append(seconds)

    def seconds(self, kind: Hashable) -> float | None:
        """Return the estimate for this kind; None without observations."""
        durations = self._durations.get(kind)
        return sorted(durations)[min(_RANK, len(durations) - 1)] if durations else None

    def record_segment(self, rows: int, now: float) -> None:
        self._queue.append((rows, now))

    def segment_done(self, now: float) -> None:
        """D0 learns that V1 has finished the oldest segment in its queue."""
        rows, began_at = self._queue.pop(0)
        expected = self.seconds(_size(rows))
        self.add_duration(_size(rows), now - began_at)
        if self._queue:
            # The next segment began when V1 became free; a busy D0 may learn that late.
            free = now if expected is None else min(now, began_at + expected)
            following, sent_at = self._queue[0]
            self._queue[0] = following, max(sent_at, free)

    def outlasts(self, kind: Hashable, now: float) -> bool:
        """Return whether D0's work, started now, would end after V1 has run out of segments.

        False unless exactly one segment is at V1 and both durations are known.
        """
        if len(self._queue) != 1:
            return False
        rows, began_at = self._queue[0]
        v1_seconds, own_seconds = self.seconds(_size(rows)), self.seconds(kind)
        return v1_seconds is not None and own_seconds is not None and began_at + v1_seconds < now + own_seconds


def _size(rows: int) -> tuple[str, int]:
    """Return the kind of a segment: row counts with the same bit length."""
    return "rows", rows.bit_length()


class Scheduler:
    """Collects the draft sessions' messages and tasks; passes arrivals on to them."""

    def __init__(self, clock: Callable[[], float] | None = None,
                 on_failure: Callable[[DraftSession, Exception], None] | None = None,
                 policy: SchedulingPolicy = "fair") -> None:
        """Set up a scheduler without requests.

        clock       the driver's, in seconds; None: no segment is sent ahead
        on_failure  gets errors of a request's own strategy or drafter, while the other requests' messages and
                    tasks are still collected; None: such an error is raised
        policy      fair: callers share rows equally, and a caller's requests divide its rows by the weights
                    of their priorities; fcfs: requests get rows in the order of priority, then age
        """
        self._clock = clock
        self._on_failure = on_failure
        self._in_order = policy == "fcfs"
        self._predictor = SlotPredictor()
        self._worth: SlotWorth | None = None  # of batches, where rows choose experts
        self._open: dict[int, DraftSession] = {}
        self._at_v1: set[tuple[int, int, int]] = set()  # session, epoch, run of each batch's first segment
        self._served: dict[int, int] = {}  # session -> the last batch that it was in
        self._batches = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[DraftSession]:
        """Iterate over a copy: any request may be removed meanwhile."""
        return iter(list(self._open.values()))

    def add(self, draft_session: DraftSession) -> Open:
        """Add a request as the youngest; return the message that every stage needs before its segments."""
        opening = replace(draft_session.open_message(), concurrent=tuple(self._open))
        self._open[opening.session] = draft_session
        self._served[opening.session] = -1
        return opening

    def remove(self, session: int) -> Close:
        """Remove a request, finished or not; return the message for the stages.

        Its segment at V1 occupies the slot until V1's credit.
        """
        del self._open[session], self._served[session]
        return Close(session)

    def take_messages(self) -> list[Segment | Batch | Prune | Cancel]:
        """Return control messages, then a segment or batch if V1 has none."""
        messages: list[Segment | Batch | Prune | Cancel] = []
        for draft_session in self:
            messages += self._ask(draft_session, draft_session.controls) or []
        if not self._at_v1:
            messages += self._take_batch(list(self._open.values()))
        return messages

    def take_ahead(self, job: Job) -> list[Segment | Batch]:
        """Return the segments to queue at V1 before D0 starts ``job``, if this is a draft pass that outlasts V1's work.

        None are sent before an output is verified, which takes little time and shows which rows are worth
        sending. Nor while a request's strategy sends nothing ahead, because that request would miss the slot.
        """
        if self._clock is None or not job.is_draft or len(self._at_v1) != 1:
            return []
        if not self._predictor.outlasts(_kind(job), self._clock()):
            return []
        running = [draft_session for draft_session in self._open.values() if not draft_session.finished]
        early = all(self._ask(draft_session, partial(getattr, draft_session.strategy, "allows_early_send"))
                    for draft_session in running)
        return self._take_batch(running) if early else []

    def _take_batch(self, among: Sequence[DraftSession]) -> list[Segment | Batch]:
        segments = self._alone(among[0]) if len(among) == 1 else self._shared(among)
        if not segments:
            return []
        for segment in segments:
            self._served[segment.session] = self._batches
        self._batches += 1
        first = segments[0]
        self._at_v1.add((first.session, first.epoch, first.run))
        if self._clock:
            self._predictor.record_segment(sum(len(segment.numbers) for segment in segments), self._clock())
        batch = batch_of(segments)
        assert not isinstance(batch, Output)
        return [batch]

    def _alone(self, draft_session: DraftSession, rows: int | None = None) -> list[Segment]:
        segment = self._ask(draft_session, partial(draft_session.next_segment, rows))
        return [segment] if segment else []

    def _first(self, among: Sequence[DraftSession]) -> list[Segment]:
        """Return a group of devices computes one segment at a time; of equal priorities the oldest comes first."""
        return next((segments for draft_session in sorted(among, key=_priority)
                     if (segments := self._alone(draft_session))), [])

    def _shared(self, among: Sequence[DraftSession]) -> list[Segment]:
        """Return a batch's segments.

        Segments that cannot be divided go whole, and rows of the other requests are chosen by their worth. Then
        chunks of prompts are added, as far as they do not delay the rest much.
        """
        if any(draft_session.strategy.parallelism != "pipeline" for draft_session in among):
            return self._first(among)
        order = sorted(among, key=_priority if self._in_order else self._last_served)[:MAX_BATCH]
        segments: list[Segment] = []
        offering: list[tuple[DraftSession, Sequence[float]]] = []
        reading = [draft_session for draft_session in order if draft_session.is_reading]
        rows = 0
        for draft_session in order:
            offer = self._ask(draft_session, partial(draft_session.row_probabilities, _MOST_ROWS))
            if offer:
                offering.append((draft_session, offer))
            elif offer is None and rows < _MOST_ROWS:
                segments += self._alone(draft_session)
                rows = sum(len(segment.numbers) for segment in segments)
        if not segments and not reading and len(offering) == 1:
            return self._alone(offering[0][0])
        curve = order[0].strategy.pipeline.slot_seconds if order else None
        if offering:
            pipeline = offering[0][0].strategy.pipeline
            stages = pipeline.stages
            if pipeline.sparse and self._worth is None:
                self._worth = SlotWorth(stages)
            offers, weights = [offer for _, offer in offering], _weights([session for session, _ in offering])
            shares = (divide_in_order(offers, curve, stages, _MOST_ROWS, rows, len(segments))
                      if self._in_order else
                      divide(offers, curve, stages, _MOST_ROWS, rows, len(segments), weights,
                             self._worth))
            for (draft_session, _), share in zip(offering, shares, strict=True):
                segments += self._alone(draft_session, share) if share else []
            rows = sum(len(segment.numbers) for segment in segments)
        room = prompt_rows_beside(curve, rows, _MOST_ROWS)
        for index, draft_session in enumerate(reading):
            if room > 0:
                weights = _weights(reading[index:])
                limit = room if self._in_order else ceil(room * weights[0] / sum(weights))
                chunk = self._alone(draft_session, limit)
                room -= sum(len(segment.numbers) for segment in chunk)
                segments += chunk
        return segments

    def _last_served(self, draft_session: DraftSession) -> int:
        return self._served[draft_session.builder.session]

    def worked(self, job: Job, seconds: float) -> None:
        self._predictor.add_duration(_kind(job), seconds)

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
        """Return the most urgent job: verifying the requests' outputs that have arrived, or else drafting."""
        outputs: list[tuple[DraftSession, Task]] = []
        for draft_session in self:
            if output := draft_session.next_output():
                outputs.append((draft_session, output))
        if outputs:
            return Job(tuple(outputs))
        drafts: list[tuple[DraftSession, Task]] = []
        for draft_session in self:
            shares = not drafts or can_share(drafts[0][0], draft_session)
            if shares and (draft := self._ask(draft_session, draft_session.next_draft)):
                drafts.append((draft_session, draft))
        return Job(tuple(drafts)) if drafts else None

    def _ask(self, draft_session: DraftSession, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except Exception as error:
            if self._on_failure is None:
                raise
            self._on_failure(draft_session, error)
            return None


def _priority(draft_session: DraftSession) -> int:
    return draft_session.request.priority


def _weights(draft_sessions: Sequence[DraftSession]) -> list[float]:
    requests = [draft_session.request for draft_session in draft_sessions]
    return fair_weights([request.caller for request in requests], [request.priority for request in requests])


def _kind(job: Job) -> bool:
    """Jobs of one kind take about the same time."""
    return job.is_draft
