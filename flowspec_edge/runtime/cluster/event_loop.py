"""D0's event loop in real time: requests share the links to the stages.

Knows the order in which D0 sends, computes and receives; does not know what the coordinators decide.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.messages import Batch, Cancel, Computed, Credit, Open, Output, Prune, Segment, Tap
from flowspec_edge.runtime.cluster.active_request import ActiveRequest, SessionState
from flowspec_edge.runtime.cluster.stage_links import StageLinks
from flowspec_edge.runtime.cluster.timing import ClusterTiming
from flowspec_edge.runtime.draft_device.capacity import session_rows
from flowspec_edge.runtime.draft_device.coordinator import Coordinator
from flowspec_edge.runtime.draft_device.prefix_cache import PrefixCache
from flowspec_edge.runtime.draft_device.scheduling.jobs import Failure, Job
from flowspec_edge.runtime.draft_device.scheduling.scheduler import Scheduler
from flowspec_edge.runtime.emulation.engine import Emulation, wait_until
from flowspec_edge.runtime.observe.observer import Observer
from flowspec_edge.runtime.observe.power import SessionEnergy
from flowspec_edge.runtime.request import Request, RequestHandle, Result, SchedulingPolicy

log = logging.getLogger(__name__)

_LAST_REPORT_S = 2.0  # timeout of the stages' session reports
_STALL_S = 120.0  # without any output while requests run and all stages answer
_MAX_LOSSES = 5  # in a row without a new token: the request may be what kills the stages

# (handle, session number, the request's coordinator before a loss or None) -> coordinator
MakeCoordinator = Callable[[RequestHandle, int, Coordinator | None], Coordinator]


class EventLoop:
    """Runs any number of requests over one set of links. Not thread-safe."""

    def __init__(self, links: StageLinks, make: MakeCoordinator, emulation: Emulation | None,
                 observer: Observer, energy: SessionEnergy, timing: ClusterTiming,
                 cache_rows: int | None = None, policy: SchedulingPolicy = "fair") -> None:
        """``cache_rows``: limit for the rows in the stages' caches; None: no limit, and no prefix cache."""
        self.warming_up = False  # the curve learns from every request, whatever its strategy
        self.pool = PrefixCache(cache_rows)
        self._observer = observer
        self._energy = energy
        self._timing = timing
        self._curve = timing.curve
        self._links = links
        self._make = make
        self._emulation = emulation
        self._policy = policy
        self._scheduler = self._new_scheduler()
        self._active: list[ActiveRequest] = []  # oldest first
        self._session = 0

    @property
    def busy(self) -> bool:
        return bool(self._active)

    @property
    def open(self) -> int:
        """Number of unfinished requests."""
        return len(self._in_state(SessionState.OPEN, SessionState.SUSPENDED))

    def has_room(self, request: Request) -> bool:
        return self.pool.fits(session_rows(request, len(self._links.members.instances)))

    def start(self, handle: RequestHandle) -> None:
        """Start a request, or continue one that gave way; one that cannot run gets its error immediately."""
        idle = not self._in_state(SessionState.OPEN, SessionState.CLOSING)
        paused = [active for active in self._in_state(SessionState.PAUSED) if active.handle is handle]
        opening = (self._open(paused[0], paused[0].coordinator) if paused else
                   self._open(ActiveRequest(handle), None))
        if opening is None:
            return
        if idle:
            self._links.members.drop_reports()
            self._links.expect_outputs_from_now()
        self._links.send(opening)

    def give_way(self) -> list[RequestHandle]:
        """Close the sessions of the requests that have to give way, for :meth:`start` to continue; the stages
        retain their rows while there is room."""
        leaving = [active for active in self._in_state(SessionState.OPEN)
                   if active.handle.suspended and not active.handle.cancel_requested]
        for active in leaving:
            active.state = SessionState.PAUSED
            active.interrupted = True
            self._observer.failed(active.coordinator, time.monotonic())
            self._close(active)
        return [active.handle for active in leaving]

    def listen_again(self) -> None:
        """Read what came while no thread drove the cluster, and count silence from now."""
        self._links.collect(self._receive)
        self._links.expect_from_now()

    # ---- losses --------------------------------------------------------------------------------

    def suspend(self, reason: str) -> None:
        """After the loss of a stage, keep unfinished requests for :meth:`resume` and answer the others. A
        request that repeatedly loses stages without progress ends with PeerLost and ``reason``."""
        open_ = self._in_state(SessionState.OPEN, SessionState.CLOSING)
        sessions = [active.session for active in open_]
        for active in [*open_, *self._in_state(SessionState.SUSPENDED)]:
            if active.coordinator.finished:
                self._active.remove(active)
                self._answer(active)
            else:
                active.suspend()
        # V1's queue and the stages' caches are gone; stages may come back on other devices.
        self._scheduler = self._new_scheduler()
        self.pool.clear()
        if self._curve is not None:
            self._curve.clear()
        self._links.close_all(sessions)
        # All requests are in each batch, so any may be the cause: the likeliest made no progress longest.
        worst = max(self._active, key=lambda active: active.losses, default=None)
        if worst and worst.losses > _MAX_LOSSES:
            self._active.remove(worst)
            self._fail(worst, PeerLost(f"stages were lost {worst.losses} times, and this request "
                                        f"got no new token meanwhile: {reason}"))
        self.answer_cancelled()

    def answer_cancelled(self) -> None:
        for active in self._in_state(SessionState.SUSPENDED, SessionState.PAUSED):
            if active.handle.cancel_requested:
                self._active.remove(active)
                active.coordinator.cancel()
                self._answer(active)

    def resume(self) -> None:
        """Open a new session for each suspended request; the stages are back, without sessions. PeerLost if a
        stage is lost again."""
        self._links.close_all([self._session])
        self._links.reset()
        for active in self._in_state(SessionState.SUSPENDED):
            opening = self._open(active, active.coordinator)
            if opening is not None:
                self._links.send(opening)

    def abandon(self, error: BaseException) -> None:
        """End every request: finished ones with their results, the others with ``error``."""
        self.pool.clear()
        for active in self._in_state(SessionState.OPEN):
            closing = self._scheduler.remove(active.session)
            with suppress(FlowspecError):
                self._links.send(closing)
        ending, self._active = self._active, []
        for active in ending:
            match active.state:
                case SessionState.CLOSING:
                    self._answer(active)
                case SessionState.OPEN | SessionState.SUSPENDED | SessionState.PAUSED:
                    self._fail(active, error)

    # ---- one step ------------------------------------------------------------------------------

    def step(self, idle_s: float) -> None:
        """Send, do the most urgent work, receive; with nothing to do, wait up to ``idle_s`` s for a message.
        PeerLost or ProtocolError if the stages cannot continue."""
        for active in self._in_state(SessionState.OPEN):
            if active.handle.cancel_requested:
                active.coordinator.cancel()
                self._end(active)
        self._dispatch(self._scheduler.take_messages())
        job = self._scheduler.next_job()
        if job is not None:
            self._dispatch(self._scheduler.take_ahead(job))
        self._end_failed()  # before the work, which may end the same request
        if job is not None:
            self._work(job)
            self._end_failed()
        received = self._links.collect(self._receive)
        if wrong := self._links.take_dropped():
            self._observer.dropped("frame", wrong)
        self._settle()
        if not received and job is None:
            self._links.sleep(idle_s)
            self._energy.update()
        self._links.check()
        if self._in_state(SessionState.OPEN) and time.monotonic() - self._links.output_at > _STALL_S:
            raise PeerLost(f"no output for {_STALL_S:g} s, though every stage answers: a segment "
                           "was lost; start the cluster again")

    def _new_scheduler(self) -> Scheduler:
        self._failures: list[Failure] = []  # of requests' own strategies and drafters, to be ended
        return Scheduler(time.monotonic, lambda *failure: self._failures.append(failure), self._policy)

    def _end_failed(self) -> None:
        failures, self._failures = self._failures, []
        for coordinator, error in failures:
            self._fail_alone(coordinator.builder.session, error)

    def _in_state(self, *states: SessionState) -> list[ActiveRequest]:
        return [active for active in self._active if active.state in states]

    def _find(self, session: int) -> ActiveRequest | None:
        return next((active for active in self._in_state(SessionState.OPEN, SessionState.CLOSING)
                     if active.session == session), None)

    def _open(self, active: ActiveRequest, before: Coordinator | None) -> Open | None:
        """Open a session for a request; ``before`` is its coordinator in an earlier session. Returns the
        message for the stages, or None if the request cannot run and was given its error."""
        # Above those of a former D0, although a board's clock may be behind after a reboot: a stage does not
        # wait for the Open of a session whose number is lower than one that it knows.
        self._session = max(self._session, self._links.members.newest, int(time.time() * 1e3)) + 1
        session, sent = self._session, 0
        if before:
            sent = self._links.bytes.pop(before.builder.session)
            self._energy.close(before.builder.session)
            self._links.members.take_reports(before.builder.session)
        try:
            active.coordinator = self._make(active.handle, session, before)
        except BaseException as error:
            if before:
                self._active.remove(active)
            active.handle.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return None
        self._links.bytes[session] = sent
        self._energy.open(session)
        active.state = SessionState.OPEN
        if not before:
            self._active.append(active)
        opening = self._scheduler.add(active.coordinator)
        held = self.pool.begin(opening.session, opening.capacity, opening.parent_session)
        self._observer.opened(active.coordinator, time.monotonic())
        active.watched = self._observer.wants_times
        strategy = active.coordinator.strategy
        learns = self._curve is not None and (self.warming_up or strategy.wants_stage_times)
        return replace(opening, retained=held, timed=active.watched or learns)

    def _receive(self, message: Output | Credit | Tap | Computed) -> None:
        if isinstance(message, Computed):
            self._learn(message)
            return
        self._observer.arrived(message, time.monotonic())
        if not self._scheduler.receive(message):
            is_open = message.session in (active.session for active in self._in_state(SessionState.OPEN))
            self._observer.dropped("stale" if is_open else "session", 1)

    def _learn(self, times: Computed) -> None:
        active = self._find(times.session)
        if active is None:
            self._observer.dropped("session", 1)
            return
        if active.watched:
            self._observer.arrived(times, time.monotonic())
        if self._curve is not None:
            self._curve.observe(times.stage, times.batch_rows, (times.end - times.start) * 1e-6)

    def _dispatch(self, messages: Sequence[Segment | Batch | Prune | Cancel]) -> None:
        for message in messages:
            self._links.send(message)
            for part in message.parts if isinstance(message, Batch) else (message,):
                assert not isinstance(part, Output)
                self._observer.sent(part, time.monotonic())
        self._links.flush()

    def _work(self, job: Job) -> None:
        left = job.without([n for n in job.sessions if self._find(n) is None])  # failed after it was chosen
        if left is None:
            return
        self._energy.work_for(*left.sessions)
        start, began = time.perf_counter(), time.monotonic()
        failures = left.complete()
        self._failures += failures
        self._energy.work_for()
        late = wait_until(start, self._emulation.devices.job_seconds(left)) if self._emulation else 0.0
        self._scheduler.worked(left, time.perf_counter() - start)
        done = left.without([coordinator.builder.session for coordinator, _ in failures])
        if done is None:
            return
        self._observer.worked(done, began, time.monotonic())
        for coordinator, _ in done.parts:
            active = self._find(coordinator.builder.session)
            assert active is not None
            active.overrun_s += late
            self._deliver(active)
            if coordinator.finished:
                self._end(active)

    def _deliver(self, active: ActiveRequest) -> None:
        handle, coordinator = active.handle, active.coordinator
        handle.likelihoods += coordinator.new_likelihoods()
        if handle.on_tokens and (new := coordinator.new_tokens()):
            try:
                handle.on_tokens(new)  # may block: messages are read before silence is checked
            except Exception as error:
                handle.set_exception(error)
                coordinator.cancel()

    # ---- results -------------------------------------------------------------------------------

    def _end(self, active: ActiveRequest) -> None:
        """Close the session, but wait for the stages' reports: they are part of the result."""
        active.state = SessionState.CLOSING
        active.report_deadline = time.monotonic() + _LAST_REPORT_S
        self._close(active)

    def _close(self, active: ActiveRequest) -> None:
        kept = self.pool.retain(active.coordinator)
        self._links.send(replace(self._scheduler.remove(active.session), retain=kept))

    def _settle(self) -> None:
        """Answer the requests whose reports are complete or overdue."""
        for active in self._in_state(SessionState.CLOSING):
            if self._links.members.all_reported(active.session) or time.monotonic() > active.report_deadline:
                self._active.remove(active)
                self._answer(active)

    def _fail_alone(self, session: int, error: Exception) -> None:
        """What one request's strategy, drafter or sampling raises ends that request; the others go on."""
        active = self._find(session)
        if active is None:
            return  # it has failed already, when it was asked for something else
        if not isinstance(error, FlowspecError):
            log.error("a request ends with an error: %s", error, exc_info=error)
        self._active.remove(active)
        self.pool.drop(session)
        closing = self._scheduler.remove(session)
        self._fail(active, error)
        self._links.send(closing)

    def _fail(self, active: ActiveRequest, error: BaseException) -> None:
        self._links.bytes.pop(active.session, None)
        self._energy.close(active.session)
        self._observer.failed(active.coordinator, time.monotonic())
        if not active.handle.done():
            active.handle.fail(error)

    def _answer(self, active: ActiveRequest) -> None:
        try:
            result = self._result(active)
        except Exception as error:  # such as a stage's absurd counters
            log.exception("a request's figures are wrong")
            self._fail(active, error)
            return
        self._observer.settled(active.coordinator, result, time.monotonic())
        if not active.handle.done():
            active.handle.set_result(result)

    def _result(self, active: ActiveRequest) -> Result:
        session = active.session
        return active.result(self._timing.slot_s, self._links.bytes.pop(session),
                             self._links.members.take_reports(session), self._energy.close(session))
