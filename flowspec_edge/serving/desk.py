"""The desk: where requests meet the cluster, a few at a time.

Knows the cluster, who has a place in it and who waits, who has gone away, and whether a token came
lately.  Does not know HTTP or text, nor how requests share the cluster.  One thread owns the cluster
and runs :meth:`Desk.run`; all else may be called from any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.runtime import tickets
from flowspec_edge.runtime.request import Likelihood, Request, Result, SharedCluster
from flowspec_edge.runtime.tickets import Outcome
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


@dataclass(eq=False)
class Ticket:
    """A request at the desk; what comes of it goes to ``deliver``, in the thread of the desk.

    position   how many had to end, when it came, before it would get a place in the cluster
    waited_s   seconds until it got one; None before that
    """

    request: Request
    deliver: Deliver
    came_at: float
    position: int = 0
    waited_s: float | None = None
    cancelled: bool = False
    begun: tickets.Ticket | None = None  # in the cluster

    @property
    def likelihoods(self) -> list[Likelihood]:
        """Of the tokens that were delivered, if the request wants them."""
        return self.begun.likelihoods if self.begun else []


@dataclass(frozen=True)
class Readiness:
    """Whether a token came through the pipeline lately; ``reason`` says why not."""

    ready: bool
    reason: str
    running: int  # requests that have a place in the cluster
    waiting: int  # requests that wait for one
    token_age_s: float | None  # seconds since the last token; None: none has come


class Desk:
    """Takes requests from any thread; the cluster answers them in the thread that owns it."""

    def __init__(self, probe: Request, capacity: int = 16, recent_s: float = 60.0, patience_s: float = 60.0,
                 at_once: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is accepted before :meth:`run` has seen a token.

        probe       a request of one token, run at the start, after a loss, and when nothing else was for
                    half of ``recent_s``
        capacity    how many may wait beside those that are answered
        recent_s    seconds for which a token shows that the pipeline works
        patience_s  seconds that those who wait keep their places while a lost cluster does not come back
        at_once     how many have a place in the cluster at a time
        clock       seconds
        """
        self._probe = probe
        self._capacity = capacity
        self._recent_s = recent_s
        self._patience_s = patience_s
        self._at_once = at_once
        self._clock = clock
        self._changed = threading.Condition()  # guards all that follows
        self._cluster: SharedCluster | None = None
        self._waiting: FairQueue[Ticket] = FairQueue()
        self._running: set[Ticket] = set()
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
            before = len(self._waiting) + len(self._running)
            if before >= self._capacity + self._at_once:
                wait = before * self._usual_s / self._at_once
                raise Full(len(self._waiting), max(1, min(60, round(wait))))
            ticket = Ticket(request, deliver, self._clock())
            self._waiting.put(caller, ticket)
            ticket.position = self._before(ticket) or 0
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody wants it any more: it leaves the queue, or ends within a turn or two."""
        with self._changed:
            ticket.cancelled = True
            self._waiting.remove(ticket)
            if ticket.begun is not None:
                ticket.begun.cancel()

    def note(self, ticket: Ticket) -> str:
        """What a request without a token yet waits for, in a line."""
        with self._changed:
            if reason := self._reason():
                return f"waiting: {' '.join(reason.split())}"
            before = self._before(ticket)
            return "working" if before is None else f"waiting, {before} before you"

    def readiness(self) -> Readiness:
        """Whether to send requests here."""
        with self._changed:
            age = None if self._token_at is None else self._clock() - self._token_at
            reason = self._reason()
            if reason is None and age is not None and age > self._recent_s:
                reason = f"no token for {age:.0f} s"
            return Readiness(reason is None, reason or "", len(self._running), len(self._waiting), age)

    @property
    def closed(self) -> bool:
        """Whether the server is ending."""
        return self._closed

    def close(self) -> None:
        """End :meth:`run`; everybody's request ends with an error.  Safe to call twice."""
        with self._changed:
            self._closed = True
            left = [*self._running, *self._waiting.clear()]
            self._running.clear()
            for ticket in left:
                if ticket.begun is not None:
                    ticket.begun.cancel()
            self._changed.notify_all()
        for ticket in left:
            self._tell(ticket, Unavailable(_ENDING))

    def _reason(self) -> str | None:
        """Why nothing is answered."""
        if self._closed:
            return _ENDING
        if self._fault is None and self._cluster is not None and (trouble := self._cluster.trouble):
            return f"the cluster is mending itself: {trouble}"
        return self._fault

    def _before(self, ticket: Ticket) -> int | None:
        """How many have to end before a request gets a place; None if it does not wait for one."""
        before = self._waiting.before(ticket)
        return None if before is None else max(0, before + 1 + len(self._running) - self._at_once)

    # ---- in the thread that owns the cluster -----------------------------------------------------

    def run(self, cluster: SharedCluster, ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests until :meth:`close`; ``ready`` is called when the first token has come.

        Raises what went wrong before that.  What goes wrong later is told to those who ask.
        """
        try:
            with self._changed:
                self._cluster = cluster
            self._check(cluster)
            if not self._closed:
                ready()
            while not self._closed:
                self._answer(cluster)
                if self._fault is not None and not self._closed:
                    self._recover(cluster)
        finally:
            self.close()

    def _answer(self, cluster: SharedCluster) -> None:
        """Give the free places to those whose turn it is, then serve until there is one again."""
        while (ticket := self._next()) is not None:
            self._begin(cluster, ticket)
        if self._fault is not None:
            return
        if self._is_quiet():
            self._look(cluster)
            return
        try:
            cluster.serve(self._is_called)
        except FlowspecError as error:
            self._lost(error)
        except Exception as error:
            self._broke(error)

    def _next(self) -> Ticket | None:
        """Whose turn it is, if there is a place."""
        with self._changed:
            if not self._has_turn():
                return None
            ticket = self._waiting.take()
            self._running.add(ticket)
            ticket.waited_s = self._clock() - ticket.came_at
            return ticket

    def _has_turn(self) -> bool:
        """Whether somebody waits who could begin."""
        open_ = not self._closed and self._reason() is None
        return open_ and len(self._waiting) > 0 and len(self._running) < self._at_once

    def _is_quiet(self) -> bool:
        """Whether nobody asks, and no token has come for long."""
        with self._changed:
            last = self._token_at
            quiet = last is not None and self._clock() - last >= self._recent_s / 2
            return quiet and not self._running and self._reason() is None

    def _is_called(self) -> bool:
        """Whether the owner of the cluster has anything to do but serve."""
        with self._changed:
            return self._closed or self._fault is not None or self._has_turn() or self._is_quiet()

    def _begin(self, cluster: SharedCluster, ticket: Ticket) -> None:
        start = self._clock()

        def on_tokens(tokens: list[int]) -> None:
            self._token_at = self._clock()
            if not ticket.cancelled:
                ticket.deliver(tokens)

        try:
            begun = cluster.submit(ticket.request, on_tokens)
        except Exception as error:
            self._ended(ticket, start, error)
            return
        with self._changed:
            ticket.begun = begun
            if ticket.cancelled or self._closed:
                begun.cancel()
        begun.on_settled(partial(self._ended, ticket, start))

    def _ended(self, ticket: Ticket, start: float, outcome: Outcome) -> None:
        """A place is free; the one who had it is told, unless that was done when the desk closed."""
        event: Event
        match outcome:
            case Result() | UsageError():
                event = outcome
            case FlowspecError():
                event = Unavailable(self._lost(outcome))
            case Exception():
                event = Unavailable(self._broke(outcome))
            case _:  # a signal, while the cluster was served
                event = Unavailable(_ENDING)
        with self._changed:
            if ticket not in self._running:
                return
            self._running.remove(ticket)
            self._usual_s += (self._clock() - start - self._usual_s) / 4
        self._tell(ticket, event)

    def _check(self, cluster: SharedCluster) -> None:
        """A token through the pipeline, or an error; neither if the desk closes meanwhile."""
        came: list[int] = []
        probe = cluster.submit(self._probe, came.extend)
        cluster.serve(lambda: probe.done or self._closed)
        if self._closed:
            probe.cancel()
            return
        probe.result()
        if not came:
            raise FlowspecError("the cluster ended a request of one token without a token")
        with self._changed:
            self._token_at, self._fault = self._clock(), None

    def _look(self, cluster: SharedCluster) -> str | None:
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
        with self._changed:
            known, self._fault = self._fault == reason, reason
        if not known:  # every request that was open brings the same news
            log.warning("%s", reason)
        return reason

    def _recover(self, cluster: SharedCluster) -> None:
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
                self._tell(ticket, Unavailable(reason))
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _tell(self, ticket: Ticket, event: Event) -> None:
        if not ticket.cancelled:
            ticket.deliver(event)
