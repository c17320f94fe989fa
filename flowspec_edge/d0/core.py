"""What D0 decides: requests and their sessions, what it sends and computes next, losses, results.

    core.start(handle)
    for message in core.take_messages(): …          # to V1 (Segment, Batch), or to every stage (the others)
    job = core.next_job(); core.take_ahead(job)     # … what goes out before D0 starts to compute
    done = core.compute(job); core.worked(job, done, start, end)
    core.receive(message)                           # an arrival
    for active in core.closing(): core.settle(active, counters)

A state machine without sockets, threads or waiting. Drivers: ``cluster.event_loop`` in real time,
``virtual.run`` on an event queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from flowspec_edge.d0.counters import HeartbeatCounters
from flowspec_edge.d0.energy import cluster_energy
from flowspec_edge.d0.jobs import Failure, Job
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.prefix_cache import PrefixCache
from flowspec_edge.d0.request import RequestHandle, SchedulingPolicy
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.d0.slot_curve import SlotCurve
from flowspec_edge.errors import FlowspecError, PeerLost
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
    parts_of,
)

log = logging.getLogger(__name__)

_LAST_REPORT_S = 2.0  # timeout of the stages' session reports
_MAX_LOSSES = 5  # in a row without a new token: the request may be what kills the stages
_LATE_SHARE = 0.02  # of the decode time: how late an emulation may be without a warning

# (handle, session number, the request's draft session before a loss or None) -> draft session
MakeDraftSession = Callable[[RequestHandle, int, DraftSession | None], DraftSession]
Outgoing = Open | Close | Prune | Cancel | Segment | Batch


class SessionState(Enum):
    OPEN = auto()
    CLOSING = auto()  # the request is over; waiting for the stages' reports
    SUSPENDED = auto()  # the stages are lost; the request will resume in another session
    PAUSED = auto()  # the request gave way to others; it will resume in another session


@dataclass(eq=False)
class ActiveRequest:
    """A request that has begun. ``bytes``: of its messages, those that no stage counts."""

    handle: RequestHandle
    draft_session: DraftSession = field(init=False)
    state: SessionState = SessionState.OPEN
    watched: bool = False  # the observer wants the stages' times
    learned: bool = False  # the curve learns from the stages' times
    bytes: int = 0
    overrun_s: float = 0.0  # by how much D0's own work exceeded the emulated time
    report_deadline: float = 0.0  # of the stages, while closing
    interrupted: bool = False  # the reports of its earlier sessions are not counted
    losses: int = 0  # of stages, in a row without a new token
    tokens_before: int = 0  # at the last loss

    @property
    def session(self) -> int:
        return self.draft_session.builder.session


class DraftCore:
    """Any number of requests over one set of stages. Not thread-safe.

    warming_up      the curve learns from every request, whatever its strategy
    pool            which rows the stages hold
    newest_session  the highest number so far
    """

    def __init__(self, make: MakeDraftSession, clock: Callable[[], float], observer: Observer,
                 numbers: Callable[[], int], curve: SlotCurve | None = None, cache_rows: int | None = None,
                 policy: SchedulingPolicy = "fair") -> None:
        """make        creates a request's draft session; what it raises, the request gets
        clock       seconds
        numbers     a session's number has to exceed this one
        curve       learns a segment's time in each stage from the stages' reports
        cache_rows  limit for the rows in the stages' caches; None: no limit, and no prefix cache
        policy      as for ``Scheduler``
        """
        self.warming_up = False
        self.pool = PrefixCache(cache_rows)
        self._make = make
        self._clock = clock
        self._observer = observer
        self._numbers = numbers
        self._curve = curve
        self._policy = policy
        self._active: list[ActiveRequest] = []  # oldest first
        self._control: list[Open | Close] = []  # not taken yet
        self.newest_session = 0
        self._failures: list[Failure] = []  # of requests' own strategies and drafters, to be ended
        self._scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._clock, lambda *failure: self._failures.append(failure), self._policy)

    # ---- requests ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._active)

    @property
    def unfinished(self) -> int:
        """Number of requests that run or are suspended."""
        return len(self._in_state(SessionState.OPEN, SessionState.SUSPENDED))

    @property
    def sessions(self) -> tuple[int, ...]:
        """Those that the stages have, or have to report on."""
        return tuple(active.session for active in self._in_state(SessionState.OPEN, SessionState.CLOSING))

    @property
    def is_decoding(self) -> bool:
        """Whether outputs are expected."""
        return bool(self._in_state(SessionState.OPEN))

    def find(self, session: int) -> ActiveRequest | None:
        return next((active for active in self._in_state(SessionState.OPEN, SessionState.CLOSING)
                     if active.session == session), None)

    def start(self, handle: RequestHandle) -> None:
        """Start a request, or continue one that gave way; one that cannot run gets its error immediately."""
        paused = [active for active in self._in_state(SessionState.PAUSED) if active.handle is handle]
        if paused:
            self._open(paused[0], paused[0].draft_session)
        else:
            self._open(ActiveRequest(handle), None)

    def _open(self, active: ActiveRequest, before: DraftSession | None) -> None:
        """Open a session; ``before``: the request's draft session in an earlier one."""
        self.newest_session = session = max(self.newest_session, self._numbers()) + 1
        try:
            active.draft_session = self._make(active.handle, session, before)
            wants_times = active.draft_session.strategy.wants_stage_times
        except BaseException as error:
            if before:
                self._active.remove(active)
            active.handle.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        active.state = SessionState.OPEN
        if not before:
            self._active.append(active)
        opening = self._scheduler.add(active.draft_session)
        retained = self.pool.begin(opening.session, opening.capacity, opening.parent_session)
        self._observer.opened(active.draft_session, self._clock())
        active.watched = self._observer.wants_times
        active.learned = self._curve is not None and (self.warming_up or wants_times)
        self._control.append(replace(opening, retained=retained, timed=active.watched or active.learned))

    def give_way(self) -> list[RequestHandle]:
        """Close the sessions of the requests that have to give way, for :meth:`start` to continue; the stages
        retain their rows while there is room."""
        leaving = [active for active in self._in_state(SessionState.OPEN)
                   if active.handle.suspended and not active.handle.cancel_requested]
        for active in leaving:
            active.state = SessionState.PAUSED
            active.interrupted = True
            self._observer.failed(active.draft_session, self._clock())
            self._close(active)
        return [active.handle for active in leaving]

    def end_cancelled(self) -> None:
        """End the requests whose handles were cancelled."""
        for active in self._active:
            if active.handle.cancel_requested and active.state is not SessionState.CLOSING:
                active.draft_session.cancel()
                self._end(active)

    # ---- what D0 sends and computes ------------------------------------------------------------

    def take_messages(self) -> list[Outgoing]:
        """Return Opens, Closes and hints, then a segment or batch if V1 has none."""
        return self._taken(self._scheduler.take_messages())

    def next_job(self) -> Job | None:
        """Return D0's most urgent work."""
        job = self._scheduler.next_job()
        self._end_failed()
        return job

    def take_ahead(self, job: Job) -> list[Outgoing]:
        """Return what to send before D0 starts ``job``: a segment to queue at V1, if the job outlasts V1's
        work."""
        return self._taken(self._scheduler.take_ahead(job))

    def take_control(self) -> list[Outgoing]:
        """Return Opens and Closes alone."""
        return self._taken([])

    def _taken(self, messages: Sequence[Segment | Batch | Prune | Cancel]) -> list[Outgoing]:
        self._end_failed()
        for message in messages:
            for part in parts_of(message) if isinstance(message, Segment | Batch) else (message,):
                assert not isinstance(part, Output)
                self._observer.sent(part, self._clock())
        control, self._control = self._control, []
        return [*control, *messages]

    def compute(self, job: Job) -> Job | None:
        """Do the work; return it for :meth:`worked`, without requests that failed or have ended. None if none
        is left."""
        if (left := job.without([n for n in job.sessions if self.find(n) is None])) is None:
            return None
        failures = left.complete()
        self._failures += failures
        return left.without([draft_session.builder.session for draft_session, _ in failures])

    def worked(self, job: Job, done: Job | None, start: float, end: float, late_s: float = 0.0) -> None:
        """Pass new tokens on, and end finished requests. ``done``: as :meth:`compute` returned it for
        ``job``; ``late_s``: by how much the work exceeded the emulated time."""
        self._scheduler.worked(job, end - start)
        if done is not None:
            self._observer.worked(done, start, end)
        for draft_session, _ in done.parts if done else ():
            active = self.find(draft_session.builder.session)
            assert active is not None
            active.overrun_s += late_s
            self._deliver(active)
            if draft_session.finished:
                self._end(active)
        self._end_failed()

    def _deliver(self, active: ActiveRequest) -> None:
        handle, draft_session = active.handle, active.draft_session
        handle.likelihoods += draft_session.new_likelihoods()
        if handle.on_tokens and (new := draft_session.new_tokens()):
            try:
                handle.on_tokens(new)  # may block: messages are read before silence is checked
            except Exception as error:
                handle.set_exception(error)
                draft_session.cancel()

    # ---- arrivals ------------------------------------------------------------------------------

    def receive(self, message: Output | Credit | Tap | Computed) -> None:
        """ProtocolError for one that does not answer what was sent."""
        if isinstance(message, Computed):
            self.show_times(message)
            self.learn(message)
            return
        self._observer.arrived(message, self._clock())
        if not self._scheduler.receive(message):
            active = self.find(message.session)
            is_open = active is not None and active.state is SessionState.OPEN
            self._observer.dropped("stale" if is_open else "session", 1)

    def show_times(self, times: Computed) -> None:
        active = self.find(times.session)
        if active is None:
            self._observer.dropped("session", 1)
        elif active.watched:
            self._observer.arrived(times, self._clock())

    def learn(self, times: Computed) -> None:
        """A stage's time counts, whether or not the request has ended meanwhile."""
        if self._curve is not None:
            self._curve.observe(times.stage, times.batch_rows, (times.end - times.start) * 1e-6)

    def charge(self, session: int, size: int) -> None:
        for active in self._active:
            if active.session == session:
                active.bytes += size

    # ---- losses --------------------------------------------------------------------------------

    def suspend(self, reason: str) -> list[int]:
        """After the loss of a stage, keep unfinished requests for :meth:`resume`, and have the others
        answered. A request that repeatedly loses stages without progress ends with PeerLost and ``reason``.
        Return the sessions that stages may still have."""
        sessions = list(self.sessions)
        for active in self._active:
            if active.draft_session.finished:
                active.state = SessionState.CLOSING
            elif active.state is not SessionState.PAUSED:
                active.state = SessionState.SUSPENDED
                active.interrupted = True
                made = len(active.draft_session.tokens)
                active.losses = active.losses + 1 if made == active.tokens_before else 1
                active.tokens_before = made
        # V1's queue and the stages' caches are gone; stages may come back on other devices.
        self._scheduler = self._new_scheduler()
        self._control.clear()
        self.pool.clear()
        if self._curve is not None:
            self._curve.clear()
        # All requests are in each batch, so any may be the cause: the likeliest made no progress longest.
        worst = max(self._active, key=lambda active: active.losses, default=None)
        if worst and worst.losses > _MAX_LOSSES:
            self._active.remove(worst)
            self._fail(worst, PeerLost(f"stages were lost {worst.losses} times, and this request "
                                       f"got no new token meanwhile: {reason}"))
        self.end_cancelled()
        return sessions

    def resume(self) -> None:
        """Open a new session for each suspended request; the stages are back, without sessions."""
        for active in self._in_state(SessionState.SUSPENDED):
            self._open(active, active.draft_session)

    def abandon(self, error: BaseException) -> None:
        """End every unfinished request with ``error``; finished ones are :meth:`closing`."""
        self.pool.clear()
        for active in [active for active in self._active if active.state is not SessionState.CLOSING]:
            self._active.remove(active)
            if active.state is SessionState.OPEN:
                self._control.append(self._scheduler.remove(active.session))
            self._fail(active, error)

    # ---- results -------------------------------------------------------------------------------

    def closing(self) -> list[ActiveRequest]:
        """The requests that wait for :meth:`settle`, with the stages' reports or after their deadline."""
        return self._in_state(SessionState.CLOSING)

    def settle(self, active: ActiveRequest, stages: Sequence[HeartbeatCounters], slot_s: float = 0.0,
               energy: HeartbeatCounters | None = None) -> None:
        """Answer a request, with the stages' final counters of its session, the time of one segment in the
        slowest stage (0: as the stages report), and D0's energy (``SessionEnergy.close``)."""
        self._active.remove(active)
        try:
            total = active.bytes + sum(
                counters.get(kind, 0.0) for counters in stages for kind in ("bytes_out", "collective_bytes"))
            slot_s = slot_s or max(counters.get("slot_s", 0.0) for counters in stages)
            result = active.draft_session.result(slot_s, round(total), tuple(stages))
            if not active.interrupted:  # a lost stage never reported its part
                joules, above = cluster_energy([energy or {}, *stages])
                stats = replace(result.stats, energy_j=joules, energy_above_idle_j=above)
                result = replace(result, stats=stats)
        except Exception as error:  # such as a stage's absurd counters
            log.exception("a request's figures are wrong")
            self._fail(active, error)
            return
        late = active.overrun_s + sum(counters.get("late_s", 0.0) for counters in stages)
        if len(result.tokens) > 1 and late > _LATE_SHARE * result.stats.decode_s:
            log.warning("emulation: this machine was too slow or too busy by %.2f s in %.2f s of decoding; "
                        "figures are too low", late, result.stats.decode_s)
        self._observer.settled(active.draft_session, result, self._clock())
        if not active.handle.done():
            active.handle.set_result(result)

    def _end(self, active: ActiveRequest) -> None:
        if active.state is SessionState.OPEN:
            active.report_deadline = self._clock() + _LAST_REPORT_S
            self._close(active)
        active.state = SessionState.CLOSING

    def _close(self, active: ActiveRequest) -> None:
        retained = self.pool.retain(active.draft_session)
        self._control.append(replace(self._scheduler.remove(active.session), retain=retained))

    def _end_failed(self) -> None:
        """What one request's strategy, drafter or sampling raises ends that request; the others go on."""
        failures, self._failures = self._failures, []
        for draft_session, error in failures:
            active = self.find(draft_session.builder.session)
            if active is None:
                continue  # it has failed already, when it was asked for something else
            if not isinstance(error, FlowspecError):
                log.error("a request ends with an error: %s", error, exc_info=error)
            self._active.remove(active)
            self.pool.drop(active.session)
            self._control.append(self._scheduler.remove(active.session))
            self._fail(active, error)

    def _fail(self, active: ActiveRequest, error: BaseException) -> None:
        self._observer.failed(active.draft_session, self._clock())
        if not active.handle.done():
            active.handle.fail(error)

    def _in_state(self, *states: SessionState) -> list[ActiveRequest]:
        return [active for active in self._active if active.state in states]
