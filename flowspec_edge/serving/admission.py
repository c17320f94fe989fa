"""Admission: what clients may have queued, and what they are told: refusals, places, losses, the end.

The cluster's queue (``d0.request_queue``) says who begins when. One thread owns the cluster and runs
:meth:`Admission.run`; all other methods are thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from flowspec_edge.d0.fair_queue import Caller
from flowspec_edge.d0.request import ClusterState, Request, RequestHandle, Result
from flowspec_edge.d0.request_queue import RequestQueue, SharedCluster
from flowspec_edge.d0.request_state import RequestState
from flowspec_edge.drivers.processes.stage_links import ADVICE
from flowspec_edge.errors import FlowspecError, RequestFailed, UsageError

log = logging.getLogger(__name__)

_PAUSE_S = 0.5  # before a lost cluster is probed again; doubled after every failure
_MAX_PAUSE_S = 15.0
_POLL_S = 0.1
_STARTING = "no token has come through the pipeline yet: the cluster is starting"
_ENDING = "the server is shutting down"


class QueueFull(FlowspecError):
    def __init__(self, running: int, waiting: int, retry_after: int) -> None:  # seconds
        super().__init__(f"the queue is full, with {running} running and {waiting} waiting; try again in "
                         f"{retry_after} s")
        self.retry_after = retry_after


class ClusterUnavailable(FlowspecError):
    """The cluster is down or ending, or it lost the request."""

    retry_after = 5  # seconds


Event = list[int] | Result | Exception  # new tokens; or the end of the request: its result or its error
Deliver = Callable[[Event], None]


class PendingRequest(RequestHandle):
    """A client's request.

    ``deliver`` gets its events, in the cluster's thread, until it is cancelled; ``position``: how many requests had
    to end before its turn when it arrived.
    """

    def __init__(self, request: Request, deliver: Deliver) -> None:
        super().__init__(request)
        self.deliver = deliver
        self.position = 0


@dataclass(frozen=True)
class Readiness:
    """Whether a token came through the pipeline recently; ``reason`` says why not."""
    ready: bool
    reason: str
    running: int  # requests that have a place in the cluster
    waiting: int
    token_age_s: float | None  # seconds since the last token; None: none has come


@dataclass(frozen=True)
class WaitingRequest:
    """A request that waits.

    ``ahead``: requests that must end before its turn; ``waited_s``: seconds since its arrival.
    """
    ahead: int
    waited_s: float
    priority: int


class Admission:
    def __init__(self, probe: Request, capacity: int = 16, recent_s: float = 60.0, patience_s: float = 60.0,
                 at_once: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """No request is accepted before :meth:`run` has seen a token.

        probe       a request of one token, run at the start, after a loss, and when the cluster was idle
                    for half of ``recent_s``
        capacity    how many requests may wait, in addition to those that run
        recent_s    seconds for which a token shows that the pipeline works
        patience_s  seconds that waiting requests stay queued while a lost cluster does not come back
        at_once     how many requests run concurrently
        """
        self._probe = probe
        self._capacity = capacity
        self._recent_s = recent_s
        self._patience_s = patience_s
        self._at_once = at_once
        self._clock = clock
        self._interrupt: Callable[[], AbstractContextManager[None]] = nullcontext
        self._ending = False
        self._lock = threading.RLock()  # guards all that follows
        self._cluster: SharedCluster | None = None
        self._queue = RequestQueue(at_once)  # empty, until the cluster's takes its place
        self._fault: str | None = _STARTING
        self._closed = False
        self._token_at: float | None = None
        self._usual_s: float | None = None  # moving average of a request's duration; None: none has ended

    # ---- from any thread -----------------------------------------------------------------------

    def submit(self, request: Request, caller: Caller, deliver: Deliver) -> PendingRequest:
        """Queue a request; callers take turns.

        QueueFull if all places are taken and its caller has a share, ClusterUnavailable if the cluster is down.
        ``deliver`` gets token lists, then one Result or exception, but nothing after :meth:`cancel`.
        """
        with self._lock:
            if self._closed:
                raise ClusterUnavailable(_ENDING)
            if self._fault is not None:
                raise ClusterUnavailable(self._fault)
            if not self._queue.admits(caller, self.places):
                raise self._full()
            pending = PendingRequest(replace(request, caller=caller), deliver)
            pending.on_tokens = partial(self._arrived, pending)
            pending.add_done_callback(lambda _: self._ended(pending))
            assert self._cluster is not None
            self._cluster.enqueue(pending)
            pending.position = self._queue.ahead(pending) or 0
        return pending

    def _full(self) -> QueueFull:
        """Return a refusal; places are counted as they will be taken, since the core may not have begun yet."""
        requests, now = self._queue.requests, self._queue.clock()
        running = min(len(requests), self._at_once)
        ages = [now - handle.placed_at for handle in requests if handle.placed_at is not None]
        duration = max(1.0 if self._usual_s is None else self._usual_s, *ages, 0.0)  # one that runs shows how long
        wait = self.places * duration / self._at_once
        return QueueFull(running, len(requests) - running, max(1, min(60, round(wait))))

    @property
    def places(self) -> int:
        """How many requests may run and wait."""
        return self._capacity + self._at_once

    def cancel(self, pending: PendingRequest) -> None:
        """Remove a request from the queue, or end it within a turn or two."""
        pending.cancel()
        self._queue.answer_cancelled()

    def status_line(self, pending: PendingRequest) -> str:
        """Return what a request without tokens is waiting for, in one line."""
        with self._lock:
            if reason := self._reason():
                return f"waiting: {' '.join(reason.split())}"
        before = self._queue.ahead(pending)
        if before is not None:
            return f"waiting, {before} before you"
        return "waiting for room in the stages' caches" if pending.state is RequestState.PLACED else "working"

    def waiting(self) -> list[WaitingRequest]:
        """Return the requests without a place, the next one first."""
        now = self._queue.clock()
        return [WaitingRequest(ahead, now - handle.arrived_at, handle.request.priority)
                for ahead, handle in self._queue.waiting]

    def readiness(self) -> Readiness:
        with self._lock:
            age = None if self._token_at is None else self._clock() - self._token_at
            reason = self._reason()
            if reason is None and age is not None and age > self._recent_s:
                reason = f"no token for {age:.0f} s"
            return Readiness(reason is None, reason or "", *self._queue.sizes, age)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End :meth:`run`; every open request ends with an error. Idempotent."""
        with self._lock:
            self._closed = True
            self._give_up(self._queue.requests, ClusterUnavailable(_ENDING))
            self._queue.paused = self._queue.patient = False

    def end(self) -> None:
        """Make :meth:`run` return within a moment. Takes no lock: for signal handlers."""
        self._ending = True

    @property
    def _over(self) -> bool:
        return self._closed or self._ending

    def _reason(self) -> str | None:
        """Say why no request can start; None if one can."""
        if self._closed:
            return _ENDING
        if self._fault is None and self._cluster is not None:
            status = self._cluster.status
            if status.state is ClusterState.RECOVERING:
                return f"the cluster is recovering: {status.outage}"
        return self._fault

    def _give_up(self, handles: Iterable[RequestHandle], error: ClusterUnavailable) -> None:
        """Tell clients that their requests end with ``error``, and cancel these."""
        with self._lock:
            for handle in handles:
                if isinstance(handle, PendingRequest):
                    self._deliver(handle, error)
                    handle.cancel()
        self._queue.answer_cancelled()

    # ---- in the thread that owns the cluster -----------------------------------------------------

    def run(self, cluster: SharedCluster, ready: Callable[[], None] = lambda: None,
            interrupt: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Answer requests until :meth:`close` or :meth:`end`.

        ``ready`` is called after the first token, and ``interrupt`` is entered around the start of a cluster.
        Raises errors before the first token; later ones go to the clients.
        """
        self._interrupt = interrupt
        try:
            with self._lock:
                self._cluster, self._queue = cluster, cluster.queue
                self._queue.places, self._queue.patient, self._queue.paused = self._at_once, True, True
            self._check(cluster)
            if not self._over:
                ready()
            while not self._over:
                self._serve(cluster)
                if self._fault is not None and not self._over:
                    self._recover(cluster)
        finally:
            self.close()

    def _serve(self, cluster: SharedCluster) -> None:
        if self._probe_due():
            self._probe_cluster(cluster)
            return
        try:
            cluster.serve(self._has_work)
        except Exception as error:
            self._mark_lost(error)

    def _probe_due(self) -> bool:
        """Return whether nothing runs and a probe is due."""
        with self._lock:
            last = self._token_at
            quiet = last is not None and self._clock() - last >= self._recent_s / 2
            return quiet and not any(self._queue.sizes) and self._reason() is None

    def _has_work(self) -> bool:
        """Return whether the cluster's thread has to leave ``serve`` to do something else."""
        with self._lock:
            return self._over or self._fault is not None or self._probe_due()

    def _arrived(self, pending: PendingRequest, tokens: list[int]) -> None:
        self._token_at = self._clock()
        self._deliver(pending, tokens)

    def _ended(self, pending: PendingRequest) -> None:
        """Deliver the outcome, unless the client was told another one."""
        event: Event
        outcome = pending.exception() or pending.result()
        match outcome:
            case Result() | UsageError() | RequestFailed():
                event = outcome
            case Exception():
                event = ClusterUnavailable(self._mark_lost(outcome))
            case _:  # a BaseException that is no Exception: the process ends
                event = ClusterUnavailable(_ENDING)
        with self._lock:
            if pending.placed_at is not None:
                duration = self._queue.clock() - pending.placed_at
                self._usual_s = duration if self._usual_s is None else self._usual_s + (duration - self._usual_s) / 4
            self._deliver(pending, event)

    def _check(self, cluster: SharedCluster) -> None:
        """Run the probe; raises an error if no token comes, unless the queue is closed."""
        tokens: list[int] = []
        with self._interrupt():
            probe = cluster.probe(self._probe, tokens.extend)
        cluster.serve(lambda: probe.done() or self._over)
        if self._over:
            probe.cancel()
            return
        probe.result()
        if not tokens:
            raise FlowspecError("the cluster ended a request of one token without a token")
        with self._lock:
            self._token_at, self._fault = self._clock(), None
            self._queue.paused = self._closed

    def _probe_cluster(self, cluster: SharedCluster) -> str | None:
        """Run the probe; return why no token came, or None."""
        try:
            self._check(cluster)
        except Exception as error:
            return self._mark_lost(error)
        return None

    def _mark_lost(self, error: Exception) -> str:
        """Note that the cluster has to pass a probe again; return the reason that clients get.

        Of a bug they get only the exception's type.
        """
        if not isinstance(error, FlowspecError):
            log.error("a fault of this program", exc_info=error)
            error = FlowspecError(f"internal error ({type(error).__name__})")
        reason = f"the cluster was lost: {str(error).removesuffix(ADVICE)}"
        with self._lock:
            is_repeated, self._fault = self._fault == reason, reason
            self._queue.paused = not self._closed  # nothing begins before a probe has passed
        if not is_repeated:  # every open request brings the same error
            log.warning("%s", reason)
        return reason

    def _recover(self, cluster: SharedCluster) -> None:
        """Probe until a token comes; after ``patience_s`` the waiting requests end with an error."""
        lost_at, pause = self._clock(), _PAUSE_S
        while not self._over:
            reason = self._probe_cluster(cluster)
            if reason is None:
                log.warning("the cluster is back after %.1f s", self._clock() - lost_at)
                return
            if self._clock() - lost_at >= self._patience_s:
                self._give_up([handle for _, handle in self._queue.waiting], ClusterUnavailable(reason))
            again_at = time.monotonic() + pause
            while not self._over and time.monotonic() < again_at:
                time.sleep(_POLL_S)  # polled, because ``end`` is for signal handlers and takes no lock
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _deliver(self, pending: PendingRequest, event: Event) -> None:
        if not pending.cancel_requested:
            pending.deliver(event)
