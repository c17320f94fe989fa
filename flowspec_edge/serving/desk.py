"""The desk: where requests meet the cluster, one at a time.

Knows the cluster, whose turn it is, who has gone away, and whether a token came lately.  Does not know
HTTP or text.  One thread owns the cluster and runs :meth:`Desk.run`; all else may be called from any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.runtime.request import Cluster, Request, Result
from flowspec_edge.serving.fairness import FairQueue

log = logging.getLogger(__name__)

_PAUSE_S = 0.5  # before a lost cluster is tried again; doubled every time
_LONGEST_PAUSE_S = 15.0
_RETRY_S = 5  # advised to clients while the cluster is down
_STARTING = "no token has come through the pipeline yet: the cluster is starting"
_ADVICE = "; start the cluster again"  # which is what the desk does
_ENDING = "the server is shutting down"


class Full(FlowspecError):
    """Too many wait; ``retry_after`` seconds may change that."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class Unavailable(FlowspecError):
    """The cluster is down, or lost the request; ``retry_after`` is in seconds."""

    def __init__(self, reason: str, retry_after: int = _RETRY_S) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


Event = list[int] | Result | Exception  # new tokens; the end; what went wrong, which is an end, too
Deliver = Callable[[Event], None]


class _Gone(Exception):
    """Raised inside a request to end it: nobody waits for it any more."""


@dataclass(eq=False)
class Ticket:
    """A request at the desk; what comes of it goes to ``deliver``, in the thread of the desk.

    position   how many were before it when it came
    waited_s   seconds until its turn; None before that
    """

    request: Request
    deliver: Deliver
    position: int
    came_at: float
    waited_s: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Readiness:
    """Whether a token came through the pipeline lately; ``reason`` says why not."""

    ready: bool
    reason: str
    waiting: int  # requests that wait for their turn
    token_age_s: float | None  # seconds since the last token; None: none has come


class Desk:
    """Takes requests from any thread, and answers them in turn in the one that owns the cluster."""

    def __init__(self, probe: Request, capacity: int = 16, recent_s: float = 60.0,
                 patience_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is accepted before :meth:`run` has seen a token.

        probe       a request of one token, run at the start, after a loss, and when nothing else was for
                    half of ``recent_s``
        capacity    how many may wait beside the one that is answered
        recent_s    seconds for which a token shows that the pipeline works
        patience_s  seconds that those who wait keep their places while a lost cluster does not come back
        clock       seconds
        """
        self._probe = probe
        self._capacity = capacity
        self._recent_s = recent_s
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: FairQueue[Ticket] = FairQueue()
        self._running: Ticket | None = None
        self._fault: str | None = _STARTING
        self._closed = False
        self._token_at: float | None = None
        self._usual_s = 1.0  # what a request took lately

    # ---- from any thread -----------------------------------------------------------------------

    def submit(self, request: Request, caller: str, deliver: Deliver) -> Ticket:
        """Queue up; Full or Unavailable if that is not to be.  ``caller``: who takes turns with others.

        ``deliver`` gets token lists, then one Result or exception; nothing after :meth:`cancel`.
        """
        with self._changed:
            if self._closed:
                raise Unavailable(_ENDING)
            if self._fault is not None:
                raise Unavailable(self._fault)
            before = len(self._waiting) + (self._running is not None)
            if before > self._capacity:
                raise Full(len(self._waiting), max(1, min(60, round(before * self._usual_s))))
            ticket = Ticket(request, deliver, before, self._clock())
            self._waiting.put(caller, ticket)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody wants it any more: it leaves the queue, or ends with its next token."""
        ticket.cancelled.set()
        with self._changed:
            self._waiting.remove(ticket)

    def readiness(self) -> Readiness:
        """Whether to send requests here."""
        with self._changed:
            age = None if self._token_at is None else self._clock() - self._token_at
            reason = _ENDING if self._closed else self._fault
            if reason is None and age is not None and age > self._recent_s:
                reason = f"no token for {age:.0f} s"
            return Readiness(reason is None, reason or "", len(self._waiting), age)

    def close(self) -> None:
        """End :meth:`run`; everybody's request ends with an error.  Safe to call twice."""
        with self._changed:
            self._closed = True
            left = [*([self._running] if self._running else []), *self._waiting.clear()]
            self._changed.notify_all()
        for ticket in left:
            self._fail(ticket, Unavailable(_ENDING))

    # ---- in the thread that owns the cluster -----------------------------------------------------

    def run(self, cluster: Cluster, ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests until :meth:`close`; ``ready`` is called when the first token has come.

        Raises what went wrong before that.  What goes wrong later is told to those who ask.
        """
        try:
            self._check(cluster)
            ready()
            while not self._closed:
                ticket = self._next()
                if ticket is not None:
                    self._answer(cluster, ticket)
                elif not self._closed:
                    self._look(cluster)
                if self._fault is not None and not self._closed:
                    self._recover(cluster)
        finally:
            self.close()

    def _next(self) -> Ticket | None:
        """Whose turn it is; None when nobody came for long, or the desk is closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) or self._closed, self._recent_s / 2)
            if self._closed or not len(self._waiting):
                return None
            self._running = ticket = self._waiting.take()
            ticket.waited_s = self._clock() - ticket.came_at
            return ticket

    def _answer(self, cluster: Cluster, ticket: Ticket) -> None:
        start = self._clock()

        def on_tokens(tokens: list[int]) -> None:
            self._token_at = self._clock()
            if ticket.cancelled.is_set() or self._closed:
                raise _Gone
            ticket.deliver(tokens)

        event: Event | None = None
        try:
            if ticket.cancelled.is_set():
                raise _Gone
            event = cluster.generate(ticket.request, on_tokens)
        except _Gone:
            pass
        except UsageError as error:
            event = error
        except FlowspecError as error:
            event = Unavailable(self._lost(error))
        except Exception as error:
            event = Unavailable(self._broke(error))
        with self._changed:
            self._running = None
            self._usual_s += (self._clock() - start - self._usual_s) / 4
        if event is not None and not ticket.cancelled.is_set() and not self._closed:
            ticket.deliver(event)

    def _check(self, cluster: Cluster) -> None:
        """A token through the pipeline, or an error."""
        came: list[int] = []
        cluster.generate(self._probe, came.extend)
        if not came:
            raise FlowspecError("the cluster ended a request of one token without a token")
        with self._changed:
            self._token_at, self._fault = self._clock(), None

    def _look(self, cluster: Cluster) -> str | None:
        """The same; returns why no token came."""
        try:
            self._check(cluster)
        except FlowspecError as error:
            return self._lost(error)
        except Exception as error:
            return self._broke(error)
        return None

    def _broke(self, error: Exception) -> str:
        """A fault of ours: no trace of it goes to clients, and the cluster is not trusted unseen."""
        log.error("a fault of this program", exc_info=error)
        return self._lost(FlowspecError(f"internal error ({type(error).__name__})"))

    def _lost(self, error: FlowspecError) -> str:
        """The cluster is down; returns why, for those who ask."""
        reason = f"the cluster was lost: {str(error).removesuffix(_ADVICE)}"
        log.warning("%s", reason)
        with self._changed:
            self._fault = reason
        return reason

    def _recover(self, cluster: Cluster) -> None:
        """Try until a token comes; those who wait keep their places, but not for ever."""
        lost_at, pause = self._clock(), _PAUSE_S
        while not self._closed:
            reason = self._look(cluster)
            if reason is None:
                log.warning("the cluster is back after %.1f s", self._clock() - lost_at)
                return
            with self._changed:
                patient = self._clock() - lost_at < self._patience_s
                left = [] if patient else self._waiting.clear()
            for ticket in left:
                self._fail(ticket, Unavailable(reason))
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _fail(self, ticket: Ticket, error: FlowspecError) -> None:
        if not ticket.cancelled.is_set():
            ticket.deliver(error)
