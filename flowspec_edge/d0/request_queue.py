"""The one queue of a cluster: the requests that wait for a place, those that have one, and who is next.

D0's core gives places and takes them away; all other threads put requests, and ask. The queue outlives the
stages: a request that waits may begin on those that are started after a loss.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from flowspec_edge.d0.fair_queue import Caller, FairQueue
from flowspec_edge.d0.request import ClusterBackend, ClusterStatus, OnTokens, Request, RequestHandle
from flowspec_edge.d0.request_state import RequestEvent, RequestState

_AGING_S = 30.0  # so many seconds of waiting count as a step of priority
_TURN_S = 2.0  # after so long of decoding, a caller's only place may go to a caller without one


class RequestQueue:
    """Thread-safe. Callers take turns, by ``Request.caller``; ``Request.priority`` orders those of one caller.

    paused   while it is set, no request gets a place, and none loses its place
    patient  whether the requests that wait go on waiting when the stages are lost
    """

    def __init__(self, places: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        """Set up an empty queue; ``places``: how many requests may have one; ``clock``: the core's, in seconds."""
        self.paused = False
        self.patient = False
        self.clock = clock
        self._lock = threading.RLock()  # guards all that follows
        self._beside: deque[RequestHandle] = deque()
        self._queue: FairQueue[RequestHandle] = FairQueue(
            clock, _AGING_S, places, lambda handle: handle.state is RequestState.PLACED,
            lambda handle: handle.turn_from is not None and clock() - handle.turn_from >= _TURN_S)

    # ---- from any thread -----------------------------------------------------------------------

    @property
    def places(self) -> float:
        return self._queue.places

    @places.setter
    def places(self, places: float) -> None:
        self._queue.places = places

    def put(self, handle: RequestHandle) -> None:
        """Queue a request: the core begins it in its turn."""
        with self._lock:
            handle.arrived_at = self.clock()
            self._queue.put(handle.request.caller, handle, handle.request.priority)

    def put_beside(self, handle: RequestHandle) -> None:
        """Begin a request at once, without a place and even while the queue is held.

        Such a request is the cluster's owner's, for instance a probe.
        """
        with self._lock:
            handle.arrived_at = self.clock()
            self._beside.append(handle)

    def admits(self, caller: Caller, limit: int) -> bool:
        """Return whether the caller may put a request, as ``FairQueue.admits`` decides."""
        with self._lock:
            return self._queue.admits(caller, limit)

    def ahead(self, handle: RequestHandle) -> int | None:
        """Return how many requests must end before this one gets a place; None if it does not wait."""
        with self._lock:
            before = self._queue.before(handle)
            return None if before is None else self._ahead(before)

    def _ahead(self, before: int) -> int:
        """Return how many requests are ahead of one that has ``before`` waiting before it.

        The first that waits may get the place of a request that has to give way.
        """
        if before == 0 and self._queue.loser() is not None:
            return 0
        return int(max(0, before + 1 + len(self._queue.placed) - self._queue.places))

    @property
    def requests(self) -> list[RequestHandle]:
        """The requests that wait or have a place, in the order of their arrival."""
        with self._lock:
            return self._queue.items

    @property
    def waiting(self) -> list[tuple[int, RequestHandle]]:
        """The requests that wait for a place, the next one first, with :meth:`ahead`."""
        with self._lock:
            return [(self._ahead(before), handle) for before, handle in enumerate(self._queue)]

    @property
    def sizes(self) -> tuple[int, int]:
        """How many requests have a place, and how many wait for one."""
        with self._lock:
            return len(self._queue.placed), len(self._queue)

    @property
    def expects(self) -> bool:
        """Whether a request is still to begin."""
        with self._lock:
            return bool(self._beside or len(self._queue))

    def answer_cancelled(self) -> None:
        """Answer the requests that were cancelled before they began."""
        with self._lock:
            cancelled = [handle for handle in self._unbegun() if handle.cancel_requested]
            self._forget(cancelled)
        for handle in cancelled:
            handle.take(RequestEvent.IS_ANSWERED)
            handle.set_cancelled()

    def fail(self, error: BaseException) -> None:
        """End the requests that have not begun with ``error``; those that wait only if the queue is not patient."""
        with self._lock:
            failing = [*self._beside] if self.patient else self._unbegun()
            self._forget(failing)
        for handle in failing:
            handle.take(RequestEvent.FAILS)
            handle.fail(error)

    def _unbegun(self) -> list[RequestHandle]:
        return [*self._beside, *(handle for handle in self._queue.items if handle.placed_at is None)]

    def _forget(self, handles: list[RequestHandle]) -> None:
        for handle in handles:
            if not self._queue.discard(handle):
                self._beside.remove(handle)

    # ---- for the core --------------------------------------------------------------------------

    def take(self) -> RequestHandle | None:
        """Give the next request a place, if there is one for it; return the request."""
        with self._lock:
            if self._beside:
                handle = self._beside.popleft()
            elif not self.paused and self._queue.has_turn():
                handle = self._queue.take()
            else:
                return None
            if handle.placed_at is None:
                handle.placed_at = self.clock()
            return handle

    def take_away(self) -> RequestHandle | None:
        """Take a place away from the request that has to give way to another one, if any; return the request.

        One that is about to end leaves its place anyway.
        """
        with self._lock:
            loser = None if self.paused else self._queue.loser()
            if loser is None or loser.state is RequestState.CLOSING:
                return None
            self._queue.withdraw(loser)
            return loser

    def leave(self, handle: RequestHandle) -> None:
        """Free the place of a request that has ended."""
        with self._lock:
            self._queue.discard(handle)


class SharedCluster(ClusterBackend, Protocol):
    """Answers several requests at once: any thread submits, one thread serves.

    queue  who waits, who has a place, and who is next
    """

    queue: RequestQueue

    @property
    def status(self) -> ClusterStatus:
        """May be read from any thread."""

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        """Start the cluster unless it runs, and :meth:`enqueue` a request; return its handle.

        Errors of the start are raised.
        """

    def enqueue(self, handle: RequestHandle) -> None:
        """Queue a request for the thread in :meth:`serve`.

        UsageError if the cluster cannot run such a request; all other errors come through the handle.
        """

    def probe(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        """Begin a request at once, beside the queue; otherwise as :meth:`submit`."""

    def serve(self, stop: Callable[[], bool]) -> None:
        """Answer requests until ``stop()``, called often, is true; the next call continues the rest.

        FlowspecError, which also ends every open request, if the cluster is lost; those that have not begun wait on
        if the queue is patient.
        """
