"""What becomes of one request, segment by segment: an observer that notes, for a trace to be made of it.

Knows a request's moments on D0 and on its stages, in D0's time.  Does not know how a trace is written
(``trace_events``).

A stage tells times of its own monotonic clock.  On one machine that is D0's clock, too, and in virtual
time there is only one.  Clocks elsewhere are mapped onto D0's by what all messages together show
(``stage_clocks``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flowspec_edge.messages import Cancel, Computed, Credit, Output, Prune, Segment, Tap
from flowspec_edge.runtime.coordinator import Coordinator, Draft
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.request import Request, Result
from flowspec_edge.runtime.sessions import Job
from flowspec_edge.runtime.stage_clocks import StageClocks


@dataclass(frozen=True, slots=True)
class StageWork:
    """A stage computed ``rows`` of a segment's rows; moments in seconds, on D0's clock.

    ``cancelled``: D0 had cancelled the segment before the stage was done with it, and it came out empty.
    """

    stage: int
    rows: int
    start: float
    end: float
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """D0 drafted, with ``rows`` nodes to expand, or verified a segment of which ``rows`` came back."""

    kind: Literal["draft", "verify"]
    start: float
    end: float
    rows: int
    tokens: tuple[int, ...] = ()  # that became text


@dataclass(eq=False)
class Journey:
    """A segment's way: sent by D0, computed by the stages, verified by D0."""

    run: int
    sent_at: float
    numbers: tuple[int, ...]
    positions: tuple[int, ...]
    prompt: bool  # its rows are text, to be read in
    times: list[tuple[Computed, float]] = field(default_factory=list)  # with their arrivals
    returned_at: float | None = None
    verified: Work | None = None


@dataclass(frozen=True, slots=True)
class Hint:
    """D0 told the stages what is not wanted any more: a Prune's range of numbers and those it keeps, or
    the runs that are cancelled."""

    at: float
    start: int = 0
    stop: int = 0
    kept: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()


@dataclass(eq=False)
class Part:
    """What happened in one session: a request is in one, and goes on in another if its stages are lost."""

    opened_at: float
    text: int  # tokens that are read in
    journeys: dict[int, Journey] = field(default_factory=dict)  # by run, as they were sent
    hints: list[Hint] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)  # D0's, in order


class Trace(Observer):
    """Notes one request and passes over all others; moments are those of the cluster's driver.

    parts       sessions in order; none as long as the request has not begun
    losses      when the stages were lost while it ran, and why
    settled_at  when it was answered; None: it never was, and what there is is incomplete
    result      what came of it
    """

    def __init__(self, request: Request, one_clock: bool = True) -> None:
        """``one_clock``: the stages share D0's clock; False: theirs are mapped onto it."""
        self.request = request
        self.one_clock = one_clock
        self.parts: list[Part] = []
        self.losses: list[tuple[float, str]] = []
        self.settled_at: float | None = None
        self.result: Result | None = None
        self._by_session: dict[int, Part] = {}
        self._newest = False  # whether the session opened last is the request's
        self._tokens = 0

    @property
    def wants_times(self) -> bool:
        return self._newest

    def opened(self, coordinator: Coordinator, at: float) -> None:
        self._newest = coordinator.request is self.request
        if self._newest:
            part = Part(at, len(self.request.prompt) + len(coordinator.tokens))
            self._by_session[coordinator.ledger.session] = part
            self.parts.append(part)

    def sent(self, message: Segment | Prune | Cancel, at: float) -> None:
        part = self._by_session.get(message.session)
        if part is None:
            return
        match message:
            case Segment():
                positions = tuple(message.positions.tolist())
                reads = bool(positions) and positions[-1] < part.text
                part.journeys[message.run] = Journey(message.run, at, tuple(message.numbers.tolist()),
                                                     positions, reads)
            case Prune():
                part.hints.append(Hint(at, message.start, message.stop, tuple(message.keep.tolist())))
            case Cancel():
                part.hints.append(Hint(at, cancelled=message.runs))

    def arrived(self, message: Output | Credit | Tap | Computed, at: float) -> None:
        part = self._by_session.get(message.session)
        journey = part.journeys.get(message.run) if part else None
        if journey is None:
            return
        if isinstance(message, Computed):
            journey.times.append((message, at))
        elif isinstance(message, Output):
            journey.returned_at = at

    def worked(self, job: Job, start: float, end: float) -> None:
        part = self._by_session.get(job.coordinator.ledger.session)
        if part is None:
            return
        if isinstance(job.task, Draft):
            part.work.append(Work("draft", start, end, len(job.task.request.nodes)))
            return
        output, tokens = job.task.output, job.coordinator.tokens
        done = Work("verify", start, end, len(output.numbers), tuple(tokens[self._tokens :]))
        self._tokens = len(tokens)
        part.work.append(done)
        part.journeys[output.run].verified = done

    def settled(self, coordinator: Coordinator, result: Result, at: float) -> None:
        if coordinator.ledger.session in self._by_session:
            self.settled_at, self.result = at, result

    def lost(self, reason: str, at: float) -> None:
        if self.parts and self.settled_at is None:
            self.losses.append((at, reason))

    # ---- what came of it ---------------------------------------------------------------------------

    def stage_work(self) -> dict[tuple[int, int], list[StageWork]]:
        """Who computed a segment, V1 first: by the index of its part and its run."""
        clocks = StageClocks()
        if not self.one_clock:
            for message, at in (told for part in self.parts for journey in part.journeys.values()
                                for told in journey.times):
                clocks.learn(message, at)
        found = {}
        for index, part in enumerate(self.parts):
            cancels = {run: hint.at for hint in reversed(part.hints) for run in hint.cancelled}
            for run, journey in part.journeys.items():
                works = []
                for message, _ in sorted(journey.times, key=lambda item: item[0].stage):
                    start, end = clocks.times(message)
                    emptied = bool(journey.numbers) and not message.rows
                    works.append(StageWork(message.stage, message.rows, start, end,
                                           emptied and cancels.get(run, end) < end))
                found[index, run] = works
        return found
