"""A cluster of processes over ZeroMQ: D0 in this process, the stages as child processes or on other hosts."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from flowspec_edge.d0.observer import Observers
from flowspec_edge.d0.request import (
    ClusterState,
    ClusterStatus,
    OnTokens,
    Request,
    RequestHandle,
    Result,
    Stats,
)
from flowspec_edge.d0.request_queue import RequestQueue
from flowspec_edge.d0.run_events import StagesBack, StagesLost
from flowspec_edge.drivers.processes.run import ProcessRun
from flowspec_edge.drivers.processes.spec import BoardStages, ClusterSpec, Here, Processes
from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.strategies.registry import require_pipelines
from flowspec_edge.util.torchdevice import make_current, memory_errors

if TYPE_CHECKING:
    from typing_extensions import Self

_CHECK_S = 0.1  # poll interval of a thread that waits while another one drives
_IDLE_S = 0.02  # poll interval of an idle cluster
_CLOSED = "the cluster is closed; start a new one"
_DOWN = "no cluster is up: submit a request first"


class ProcessCluster:
    """A ``d0.request_queue.SharedCluster`` whose stages are processes.

    They start with the first request, or by :meth:`start`, and with the next request after a loss that is final.
    Any thread may submit requests; one thread at a time drives the event loop for all of them.

    running  the run of the processes; None while there is none
    """

    clock = "wall"
    running: ProcessRun | None

    def __init__(self, spec: ClusterSpec, backend: Processes = Here()) -> None:  # noqa: B008 (it is frozen)
        """Start nothing: errors of the start, such as more stages than layers, are raised there."""
        self.running = None
        self.queue = RequestQueue(spec.at_once)
        self._spec, self._backend = spec, backend
        self._observer = Observers([spec.observer] if spec.observer else [])
        self._life = threading.RLock()  # held while a run starts or ends, and while a request joins it
        self._driver = threading.Lock()
        self._closed = False
        self._lost = False  # whether the last run ended by itself and no other has started yet

    def start(self) -> Self:
        """Start the stages, or connect to them, unless they run, and wait until all are ready.

        Errors as of ``ProcessRun``.
        """
        with self._life:
            if self._closed:
                raise FlowspecError(_CLOSED)
            if self.running is None:
                self.queue.fail(FlowspecError(_DOWN))  # what came after the end of the run before
                self._start()
        return self

    @property
    def pids(self) -> list[int]:
        """The stages' process ids, V1's first; empty if they were started elsewhere, or do not run."""
        running = self.running
        return running.workers.pids if running else []

    @property
    def busy(self) -> bool:
        running = self.running
        return self.queue.expects or (running is not None and running.core.busy)

    @property
    def status(self) -> ClusterStatus:
        running = self.running
        return running.recovery.status if running else ClusterStatus(ClusterState.STOPPED)

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        """Queue a request, from any thread, and start the processes if none run; return its handle.

        UsageError if the strategy exists in virtual time only, and the errors of :meth:`start`; all others come
        through the handle.
        """
        handle = RequestHandle(request, on_tokens)
        self._start_for(request, lambda: self.queue.put(handle))
        return handle

    def enqueue(self, handle: RequestHandle) -> None:
        """Queue a request, from any thread, without starting processes.

        If none run, the request waits for the next start. UsageError if the strategy exists in virtual time only.
        """
        require_pipelines([handle.request.strategy])
        self.queue.put(handle)

    def probe(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        """Begin a request at once, beside the queue; otherwise as :meth:`submit`."""
        handle = RequestHandle(request, on_tokens)
        self._start_for(request, lambda: self.queue.put_beside(handle))
        return handle

    def _start_for(self, request: Request, put: Callable[[], None]) -> None:
        require_pipelines([request.strategy])
        self._refresh()
        with self._life:
            self.start()
            put()

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request.

        UsageError if it does not fit; PeerLost if a stage is lost for good, which ends the processes until the next
        request.
        """
        return self._answer(self.submit(request, on_tokens))

    def generate_many(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None
                      ) -> list[Result]:
        """Run requests that share the pipeline, as ``d0.request.ClusterBackend``.

        A request that is due is submitted between two steps of the event loop, so on an idle cluster up to 20 ms
        late.
        """
        if not requests:
            return []
        require_pipelines(request.strategy for request in requests)
        self._refresh()
        self.start()
        began = time.monotonic()
        arrival_times = arrivals or [0.0] * len(requests)
        waiting = deque(sorted((at, index) for index, at in enumerate(arrival_times)))
        handles: dict[int, RequestHandle] = {}

        def done() -> bool:
            while waiting and waiting[0][0] <= time.monotonic() - began:
                index = waiting.popleft()[1]
                handles[index] = RequestHandle(requests[index])
                self.queue.put(handles[index])  # without a lock, which a start may hold that waits for us
            return not waiting and all(handle.done() for handle in handles.values())

        self._drive_or_wait(done, handles.values())
        with memory_errors(self._spec.device):
            results = [handles[index].result() for index in range(len(requests))]
        return [replace(result, token_at=tuple(at - began for at in result.token_at)) for result in results]

    def serve(self, stop: Callable[[], bool]) -> None:
        with self._driver:
            self._drive(stop)

    def _answer(self, handle: RequestHandle) -> Result:
        self._drive_or_wait(handle.done, [handle])
        with memory_errors(self._spec.device):  # of D0's work for this request, which ends no other
            return handle.result()

    def _drive_or_wait(self, done: Callable[[], bool], handles: Collection[RequestHandle]) -> None:
        """Return when ``done()``; drive the event loop unless another thread does."""
        while not done():
            open_handles = [handle for handle in list(handles) if not handle.done()]
            # Without one, the next request is not due yet: wait for the other thread to stop driving until it may be.
            if self._driver.acquire(timeout=0.0 if open_handles else _IDLE_S):
                try:
                    self._drive(done)
                finally:
                    self._driver.release()
            elif open_handles:
                futures.wait(open_handles, _CHECK_S)

    # ---- start and end -------------------------------------------------------------------------

    def _refresh(self) -> None:
        if isinstance(self._backend, BoardStages):
            self._backend.refresh()

    def _start(self) -> None:
        gc.collect()  # frees the reference cycles of the run before, which hold D0's models
        spec, backend = self._spec, self._backend
        with ExitStack() as undo, memory_errors(spec.device):
            if isinstance(backend, BoardStages):
                undo.callback(backend.disconnect)
                backend = backend.connect()
            running = ProcessRun(spec, backend, self._observer, self.queue)
            self.running = running
            undo.callback(self._end)
            with spec.slow():
                running.core.warming_up = True
                running.timing.warm_up(self._run_alone, running.members.accepted_prompt_rows)
                running.core.warming_up = False
            if spec.idle_s and running.meter:
                over = time.monotonic() + spec.idle_s
                self.serve(lambda: time.monotonic() > over)
            undo.pop_all()
        if self._lost:
            self._lost = False
            self._observer.observe(StagesBack(time.monotonic()))

    def _run_alone(self, request: Request) -> Stats:
        assert self.running is not None
        handle = RequestHandle(request)
        self.queue.put_beside(handle)
        stats = self._answer(handle).stats
        self.running.core.pool.clear()
        return stats

    def _end(self) -> None:
        """End the processes; no thread may be driving. The next request starts others."""
        running, self.running = self.running, None
        if running is not None:
            running.close()
        if isinstance(self._backend, BoardStages):
            self._backend.disconnect()

    def close(self) -> None:
        """End the processes started here and close all sockets; idempotent. No thread may be driving."""
        with self._life:
            self._closed = True
            self._end()
            self.queue.patient = False
            self.queue.fail(FlowspecError(_CLOSED))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- the driving thread --------------------------------------------------------------------

    def _drive(self, stop: Callable[[], bool]) -> None:
        running = self.running
        if running is None:
            raise FlowspecError(_CLOSED if self._closed else _DOWN)
        make_current(self._spec.device)
        running.energy.skip()  # since the last drive this process may have done other work
        with memory_errors(self._spec.device):
            self._step_until(stop, running)

    def _step_until(self, stop: Callable[[], bool], running: ProcessRun) -> None:
        first = True
        try:
            while not stop():
                if self.running is not running:
                    raise FlowspecError(_CLOSED)
                try:
                    if first:
                        first = False
                        running.loop.listen_again()
                    self._step(running)
                except PeerLost as error:
                    running.recovery.begin(error)  # raises it if recovery is not possible
                    running.loop.suspend(str(error))
        except FlowspecError as error:
            try:
                if self.status.state is ClusterState.RUNNING:
                    self._observer.observe(StagesLost(time.monotonic(), str(error)))
            finally:
                with self._life:
                    self._abandon(running, error)
                    self._lost = True
                    self._end()
                    self.queue.fail(error)  # submitted by who was told that the others have ended
            raise
        except BaseException as error:  # Ctrl-C, or a bug: the stages can go on
            self._abandon(running, error)
            raise

    def _step(self, running: ProcessRun) -> None:
        if running.recovery.status.state is ClusterState.RECOVERING:
            running.loop.carry_out()  # cancelled requests are answered meanwhile
            if not running.recovery.poll():
                return
            running.loop.resume()
            running.recovery.end()
        running.loop.step(_CHECK_S if running.core.sessions else _IDLE_S)

    def _abandon(self, running: ProcessRun, error: BaseException) -> None:
        self.queue.fail(error)
        running.loop.abandon(error)
