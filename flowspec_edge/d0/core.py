"""What D0 decides: requests and their sessions, what it sends and computes next, losses, results.

A driver feeds what happened and asks what to do next, until it is told to wait (``events``). The core alone
knows the order: Opens and Closes first, then hints and a segment if V1 has none, then D0's most urgent work,
and before work that outlasts V1's another segment. The states of a request are in ``request_state``.

A state machine without sockets, threads or waiting. Drivers: ``drivers.processes.event_loop`` in real time,
``drivers.virtual.run`` on an event queue.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowspec_edge.d0.capacity import session_rows
from flowspec_edge.d0.energy import cluster_energy
from flowspec_edge.d0.events import (
    Abandoned,
    Action,
    Back,
    Compute,
    Event,
    Finish,
    Learned,
    Lost,
    Outgoing,
    Reported,
    Send,
    Shown,
    Wait,
    Worked,
)
from flowspec_edge.d0.jobs import Failure, Job
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.prefix_cache import PrefixCache
from flowspec_edge.d0.request import RequestHandle, SchedulingPolicy
from flowspec_edge.d0.request_queue import RequestQueue
from flowspec_edge.d0.request_state import RequestEvent, RequestState
from flowspec_edge.d0.run_events import (
    DraftDeviceWork,
    DropReason,
    MessagesDropped,
    OutputArrived,
    SessionEnded,
    SessionProgress,
    StageTimes,
    message_event,
)
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.d0.session import DraftPass, DraftSession, Task
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
LATE_EMULATION = ("emulation: this machine was too slow or too busy by %.2f s in %.2f s of decoding; "
                  "figures are too low")

# (handle, session number, the request's draft session before a loss or None) -> draft session
MakeDraftSession = Callable[[RequestHandle, int, DraftSession | None], DraftSession]


@dataclass(eq=False)
class ActiveRequest:
    """A request from its first place on. ``bytes``: of those of its messages that no stage counts."""

    handle: RequestHandle
    newest: DraftSession | None = None  # its draft session; None until it first opens
    progress: SessionProgress | None = None  # of the newest draft session
    watched: bool = False  # the observer wants the stages' times
    learned: bool = False  # the curve learns from the stages' times
    bytes: int = 0
    overrun_s: float = 0.0  # by how much D0's own work exceeded the emulated time
    report_deadline: float = -math.inf  # of the stages, while closing; -inf: no more will come
    interrupted: bool = False  # the reports of its earlier sessions are not counted
    losses: int = 0  # of stages, in a row without a new token
    tokens_before: int = 0  # at the last loss

    @property
    def state(self) -> RequestState:
        return self.handle.state

    @property
    def draft_session(self) -> DraftSession:
        """The newest; only once it has been open."""
        assert self.newest is not None
        return self.newest

    @property
    def session(self) -> int:
        return self.draft_session.builder.session

    def take(self, event: RequestEvent) -> None:
        self.handle.take(event)


@dataclass(eq=False)
class _Work:
    """D0's own work that a driver was told to do.

    ``done``: the job without requests that failed or had ended; None until it is done, and if none is left.
    """

    job: Job
    handed_out: bool = False  # the driver was told
    done: Job | None = None


class DraftCore:
    """Any number of requests over one set of stages. Not thread-safe.

    warming_up      the curve learns from every request, whatever its strategy
    queue           where requests wait for their places; any thread may put some
    pool            which rows the stages hold
    newest_session  the highest number so far
    """

    def __init__(self, make: MakeDraftSession, clock: Callable[[], float], observer: Observer,
                 numbers: Callable[[], int], stages: int, curve: SlotCurve | None = None,
                 cache_rows: int | None = None, queue: RequestQueue | None = None,
                 policy: SchedulingPolicy = "fair") -> None:
        """Set up a core without requests.

        make        creates a request's draft session; what it raises, the request gets
        clock       seconds
        numbers     a session's number has to exceed this one
        curve       learns a segment's time in each stage from the stages' reports
        cache_rows  limit for the rows in the stages' caches; None: no limit, and no prefix cache
        queue       gives requests their places; None: a new one, with a place for every request
        policy      as for ``Scheduler``
        """
        self.warming_up = False
        self.queue = RequestQueue(clock=clock) if queue is None else queue
        self.pool = PrefixCache(cache_rows)
        self.newest_session = 0
        self._make = make
        self._clock = clock
        self._observer = observer
        self._numbers = numbers
        self._stages = stages
        self._curve = curve
        self._policy = policy
        self._requests: list[ActiveRequest] = []  # begun and not ended, in the order of their newest places
        self._control: list[Open | Close] = []  # to send
        self._failures: list[Failure] = []  # of requests' own strategies and drafters, to be ended
        self._failed: list[tuple[RequestHandle, BaseException]] = []  # to be answered after their Closes
        self._outage = False
        self._abandoning = False  # until the next Wait, nothing begins
        self._forget_stages()

    def _forget_stages(self) -> None:
        """V1's queue and the stages' caches are empty, and no work is begun."""
        self._scheduler = Scheduler(self._clock, lambda *failure: self._failures.append(failure),
                                    self._policy)
        self._work: _Work | None = None
        self._has_taken_messages = False  # for hints and a segment, since D0's last work or wait
        self._control.clear()
        self.pool.clear()

    # ---- questions -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._requests or self._failed or self.queue.expects)

    @property
    def sessions(self) -> tuple[int, ...]:
        """The sessions that the stages hold or must still report on."""
        return tuple(request.session for request in self._in_state(RequestState.OPEN, RequestState.CLOSING))

    @property
    def closing(self) -> tuple[int, ...]:
        """The sessions whose reports are awaited (Reported)."""
        return tuple(request.session for request in self._in_state(RequestState.CLOSING))

    @property
    def is_decoding(self) -> bool:
        """Whether outputs are expected."""
        return bool(self._in_state(RequestState.OPEN))

    def find(self, session: int) -> ActiveRequest | None:
        return next((request for request in self._in_state(RequestState.OPEN, RequestState.CLOSING)
                     if request.session == session), None)

    def _open_request(self, session: int) -> ActiveRequest | None:
        request = self.find(session)
        return request if request is not None and request.state is RequestState.OPEN else None

    def _in_state(self, *states: RequestState) -> list[ActiveRequest]:
        return [request for request in self._requests if request.state in states]

    # ---- the interface of drivers --------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Take in what happened. ProtocolError for an arrival that does not answer what was sent."""
        match event:
            case Output() | Credit() | Tap():
                self._receive(event)
            case Computed():
                self._show(event)
                self._learn(event)
            case Shown():
                self._show(event.times)
            case Learned():
                self._learn(event.times)
            case Worked():
                self._worked(event)
            case Reported():
                self._settle(event)
            case Lost():
                self._suspend(event.reason)
            case Back():
                self._resume()
            case Abandoned():
                self._abandon(event.error)

    def charge(self, session: int, size: int) -> None:
        """Count a message of ``size`` bytes that went over a link for this session."""
        for request in self._requests:
            if request.newest is not None and request.session == session:
                request.bytes += size

    def next(self) -> Action:
        """Return what the driver has to do now."""
        self._heed_cancels()
        if not self._outage and not self._abandoning:
            self._give_places()
        if self._control:
            return self._make_send([])
        self._answer_failed()
        if (overdue := self._overdue()) is not None:
            return Finish(overdue.session)
        if self._work is None and not self._outage:
            if not self._has_taken_messages:
                self._has_taken_messages = True
                messages = self._scheduler.take_messages()
                self._end_failed()
                if messages or self._control:
                    return self._make_send(messages)
            if (job := self._scheduler.next_job()) is not None:
                self._work = _Work(job)
            self._end_failed()
            if job is not None and (ahead := self._scheduler.take_ahead(job)):
                self._end_failed()
                return self._make_send(ahead)
        if self._control:  # of requests that failed
            return self._make_send([])
        self._has_taken_messages = False
        if self._work is not None and not self._work.handed_out:
            self._work.handed_out = True
            return Compute(self._work.job, self._do_work)
        self._abandoning = False
        return Wait()

    def _make_send(self, messages: Sequence[Segment | Batch | Prune | Cancel]) -> Send:
        for message in messages:
            for part in parts_of(message) if isinstance(message, Segment | Batch) else (message,):
                assert not isinstance(part, Output)
                self._observer.observe(message_event(part, self._clock()))
        control: list[Outgoing] = [*self._control]
        self._control.clear()
        return Send([*control, *messages])

    # ---- places --------------------------------------------------------------------------------

    def _heed_cancels(self) -> None:
        """End the requests whose handles were cancelled."""
        self.queue.answer_cancelled()
        for request in list(self._requests):
            if not request.handle.cancel_requested or request.state is RequestState.CLOSING:
                continue
            if request.newest is not None:
                request.draft_session.cancel()
                self._complete(request)
                continue
            self._end(request, RequestEvent.IS_ANSWERED)
            if not request.handle.done():
                request.handle.set_cancelled()

    def _give_places(self) -> None:
        """Begin requests, as far as there are places and there is room in the stages' caches.

        Take places away from those that have to give way, once between two waits or works: it takes milliseconds to
        find them among many callers. A request without room keeps all others from beginning.
        """
        while True:
            for request in self._in_state(RequestState.PLACED):
                if not self.pool.fits(session_rows(request.handle.request, self._stages)):
                    break
                self._open(request)
            if (handle := self.queue.take()) is not None:
                self._place_request(handle)
            elif not self._has_taken_messages and (handle := self.queue.take_away()) is not None:
                self._preempt(handle)
            else:
                return

    def _place_request(self, handle: RequestHandle) -> None:
        request = self._request_of(handle)
        if request is None:
            request = ActiveRequest(handle)
        else:
            self._requests.remove(request)
        request.take(RequestEvent.IS_PLACED)
        self._requests.append(request)

    def _preempt(self, handle: RequestHandle) -> None:
        """Close the session of a request that has lost its place, if it is open.

        The stages retain its rows while there is room.
        """
        request = self._request_of(handle)
        assert request is not None
        if request.state is RequestState.OPEN:
            request.interrupted = True
            self._observer.observe(SessionEnded(request.session, self._clock(), None))
            self._close(request)
        request.take(RequestEvent.IS_PREEMPTED)
        handle.turn_from = None

    def _request_of(self, handle: RequestHandle) -> ActiveRequest | None:
        return next((request for request in self._requests if request.handle is handle), None)

    def _end(self, request: ActiveRequest, event: RequestEvent) -> None:
        """End the request, and free its place."""
        request.take(event)
        self._requests.remove(request)
        self.queue.leave(request.handle)

    def _open(self, request: ActiveRequest) -> None:
        """Open a session that continues the request's earlier one, if any.

        A request that cannot run gets its error immediately.
        """
        self.newest_session = session = max(self.newest_session, self._numbers()) + 1
        try:
            request.newest = self._make(request.handle, session, request.newest)
            wants_times = request.draft_session.strategy.wants_stage_times
        except BaseException as error:
            self._end(request, RequestEvent.FAILS)
            request.handle.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        request.take(RequestEvent.OPENS)
        opening = self._scheduler.add(request.draft_session)
        retained = self.pool.begin(opening.session, opening.capacity, opening.parent_session)
        request.progress = SessionProgress(request.draft_session)
        self._observer.observe(request.progress.opened(self._clock()))
        request.watched = self._observer.wants_times
        request.learned = self._curve is not None and (self.warming_up or wants_times)
        self._control.append(replace(opening, retained=retained, timed=request.watched or request.learned))

    # ---- D0's work -----------------------------------------------------------------------------

    def _do_work(self) -> None:
        """Do the job, without requests that are not open any more.

        A request may be cancelled after its work was chosen, while a segment goes ahead of it.
        """
        work = self._work
        if work is None:  # stages were lost meanwhile
            return
        open_job = work.job.without([n for n in work.job.sessions if self._open_request(n) is None])
        if open_job is not None:
            failures = open_job.complete()
            self._failures += failures
            work.done = open_job.without([draft_session.builder.session for draft_session, _ in failures])

    def _worked(self, event: Worked) -> None:
        """Pass new tokens on, and end finished requests."""
        work, self._work = self._work, None
        if work is None:
            return
        self._scheduler.worked(work.job, event.end - event.start)
        for draft_session, task in work.done.parts if work.done else ():
            self._tell_work(draft_session, task, event.start, event.end)
        for draft_session, _ in work.done.parts if work.done else ():
            request = self._open_request(draft_session.builder.session)
            if request is None:  # it was cancelled while D0 worked
                continue
            request.overrun_s += event.late_s
            self._deliver(request)
            if draft_session.finished:
                self._complete(request)
        self._end_failed()

    def _tell_work(self, draft_session: DraftSession, task: Task, start: float, end: float) -> None:
        session = draft_session.builder.session
        request = self.find(session)
        if isinstance(task, DraftPass):
            self._observer.observe(DraftDeviceWork(session, end, "draft", start, len(task.request.nodes)))
        elif request is not None and request.progress is not None:
            rows, run = len(task.output.numbers), task.output.run
            self._observer.observe(request.progress.verified(start, end, rows, run))

    def _deliver(self, request: ActiveRequest) -> None:
        handle, draft_session = request.handle, request.draft_session
        handle.likelihoods += draft_session.new_likelihoods()
        new = draft_session.new_tokens()
        if new and handle.turn_from is None:
            handle.turn_from = self._clock()
        if new and handle.on_tokens:
            try:
                handle.on_tokens(new)  # may block: messages are read before silence is checked
            except Exception as error:
                handle.set_exception(error)
                draft_session.cancel()

    # ---- arrivals ------------------------------------------------------------------------------

    def _receive(self, message: Output | Credit | Tap) -> None:
        if isinstance(message, Output):
            self._observer.observe(OutputArrived(message.session, self._clock(), message.run,
                                                 len(message.numbers)))
        if not self._scheduler.receive(message):
            reason: DropReason = "stale" if self._open_request(message.session) else "session"
            self._observer.observe(MessagesDropped(reason, 1))

    def _show(self, times: Computed) -> None:
        request = self.find(times.session)
        if request is None:
            self._observer.observe(MessagesDropped("session", 1))
        elif request.watched:
            self._observer.observe(StageTimes(times.session, self._clock(), times))

    def _learn(self, times: Computed) -> None:
        """Take a stage's time into the curve, whether or not the request has ended meanwhile."""
        if self._curve is not None:
            self._curve.observe(times.stage, times.batch_rows, (times.end - times.start) * 1e-6)

    # ---- losses --------------------------------------------------------------------------------

    def _suspend(self, reason: str) -> None:
        """Keep unfinished requests until the stages are back, and have the others answered.

        A request that repeatedly loses stages without progress ends with PeerLost and ``reason``.
        """
        self._outage = True
        self._forget_stages()  # they may come back on other devices
        if self._curve is not None:
            self._curve.clear()
        self._answer_failed()
        for request in self._requests:
            if request.state is RequestState.OPEN and request.draft_session.finished:
                request.take(RequestEvent.COMPLETES)
            request.take(RequestEvent.LOSES_STAGES)
            request.report_deadline = -math.inf
            if request.state is RequestState.SUSPENDED:
                request.interrupted = True
                generated = len(request.draft_session.tokens)
                request.losses = request.losses + 1 if generated == request.tokens_before else 1
                request.tokens_before = generated
        # All requests are in each batch, so any may be the cause: the likeliest made no progress longest.
        worst = max(self._requests, key=lambda request: request.losses, default=None)
        if worst and worst.losses > _MAX_LOSSES:
            self._fail(worst, PeerLost(f"stages were lost {worst.losses} times, and this request "
                                       f"got no new token meanwhile: {reason}"))
            self._answer_failed()

    def _resume(self) -> None:
        """Open a new session for each suspended request; the stages are back, without sessions."""
        self._outage = False
        for request in self._in_state(RequestState.SUSPENDED):
            self._open(request)

    def _abandon(self, error: BaseException) -> None:
        """Close all sessions; finished requests are answered with the reports that have come."""
        self._abandoning = True
        self.pool.clear()
        self._work, self._has_taken_messages = None, False
        for request in list(self._requests):
            if request.state is RequestState.CLOSING:
                request.report_deadline = -math.inf
                continue
            if request.state is RequestState.OPEN:
                self._control.append(self._scheduler.remove(request.session))
            self._fail(request, error)

    # ---- results -------------------------------------------------------------------------------

    def _complete(self, request: ActiveRequest) -> None:
        """End a complete answer: close the session, if the stages have one, and await their reports."""
        if request.state is RequestState.OPEN:
            request.report_deadline = self._clock() + _LAST_REPORT_S
            self._close(request)
        else:
            request.report_deadline = -math.inf
        if request.state is RequestState.QUEUED:
            self.queue.leave(request.handle)  # it needs no place any more
        request.take(RequestEvent.COMPLETES)

    def _close(self, request: ActiveRequest) -> None:
        retained = self.pool.retain(request.draft_session)
        self._control.append(replace(self._scheduler.remove(request.session), retain=retained))

    def _overdue(self) -> ActiveRequest | None:
        closing = self._in_state(RequestState.CLOSING)
        now = self._clock() if closing else 0.0
        return next((request for request in closing if now > request.report_deadline), None)

    def _settle(self, report: Reported) -> None:
        """Answer a request."""
        request = self.find(report.session)
        assert request is not None
        stages = report.stages
        try:
            total = request.bytes + sum(
                counters.get(kind, 0.0) for counters in stages for kind in ("bytes_out", "collective_bytes"))
            slot_s = report.slot_s or max(counters.get("slot_s", 0.0) for counters in stages)
            result = request.draft_session.result(slot_s, round(total), tuple(stages))
            if not request.interrupted:  # a lost stage never reported its part
                joules, above = cluster_energy([report.energy or {}, *stages])
                stats = replace(result.stats, energy_j=joules, energy_above_idle_j=above)
                result = replace(result, stats=stats)
        except Exception as error:  # such as a stage's absurd counters
            log.exception("a request's figures are wrong")
            self._fail(request, error)
            return
        self._end(request, RequestEvent.IS_ANSWERED)
        late = request.overrun_s + sum(counters.get("late_s", 0.0) for counters in stages)
        if len(result.tokens) > 1 and late > _LATE_SHARE * result.stats.decode_s:
            log.warning(LATE_EMULATION, late, result.stats.decode_s)
        self._observer.observe(SessionEnded(request.session, self._clock(), result))
        if not request.handle.done():
            request.handle.set_result(result)

    def _end_failed(self) -> None:
        """End the requests whose strategy, drafter or sampling raised an error; the others go on."""
        failures, self._failures = self._failures, []
        for draft_session, error in failures:
            request = self._open_request(draft_session.builder.session)
            if request is None:
                continue  # it has ended already
            if not isinstance(error, FlowspecError):
                log.error("a request ends with an error: %s", error, exc_info=error)
            self.pool.drop(request.session)
            self._control.append(self._scheduler.remove(request.session))
            self._fail(request, error)

    def _fail(self, request: ActiveRequest, error: BaseException) -> None:
        """Give the request its error when its Close, if any, is on its way."""
        if request.newest is not None:
            self._observer.observe(SessionEnded(request.session, self._clock(), None))
        self._end(request, RequestEvent.FAILS)
        self._failed.append((request.handle, error))

    def _answer_failed(self) -> None:
        failed, self._failed = self._failed, []
        for handle, error in failed:
            if not handle.done():
                handle.fail(error)
