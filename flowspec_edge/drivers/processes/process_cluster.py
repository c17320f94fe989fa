"""A cluster of processes over ZeroMQ: D0 in this process, the stages as child processes or on other hosts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import torch

from flowspec_edge.d0.core import DraftCore
from flowspec_edge.d0.events import Submitted
from flowspec_edge.d0.models import DraftModels
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
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.drivers.observe.power import SessionEnergy
from flowspec_edge.drivers.processes.addresses import (
    LocalPlan,
    Loopback,
)
from flowspec_edge.drivers.processes.event_loop import EventLoop
from flowspec_edge.drivers.processes.membership import Membership
from flowspec_edge.drivers.processes.recovery import Recovery
from flowspec_edge.drivers.processes.spec import ClusterSpec, Connected, Here
from flowspec_edge.drivers.processes.stage_links import StageLinks
from flowspec_edge.drivers.processes.subprocesses import WorkerProcesses
from flowspec_edge.drivers.processes.timing import ClusterTiming
from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.lab.emulation.links import EmulatedTransport
from flowspec_edge.model.manifest import SESSIONS, ComputeDtype
from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.stage.shard import stage_ranges
from flowspec_edge.strategies.registry import require_pipelines
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import ZmqTransport
from flowspec_edge.util.tensors import parse_dtype
from flowspec_edge.util.threads import share_of_cores
from flowspec_edge.util.torchdevice import make_current

_CHECK_S = 0.1  # poll interval of a thread that waits while another one drives
_IDLE_S = 0.02  # poll interval of an idle cluster
_SHUTDOWN_S = 1.0  # for a stage to end after Shutdown
_CLOSED = "the cluster is closed; start a new one"


class ProcessCluster:
    """A ``d0.request.SharedCluster`` whose stages are processes. Any thread may submit requests; one
    thread at a time drives the event loop for all of them."""

    clock = "wall"

    def __init__(self, spec: ClusterSpec, place: Here | Connected = Here()  # noqa: B008 (it is frozen)
                 ) -> None:
        """Start the stages, or connect to them, and wait until all have loaded.

        Links to stages that are started here are encrypted, with keys made for this cluster. UsageError if
        the model cannot be cut into so many stages; then nothing is started. PeerLost if a stage does not
        start.
        """
        here = place if isinstance(place, Here) else Here()
        model_dir, stages, emulation = Path(spec.model), spec.stages, here.emulation
        parse_dtype(spec.dtype)
        stage_ranges(ModelDir(model_dir).stages, stages)
        self._device = spec.device
        self.observer = Observers([spec.observer] if spec.observer else [])
        self._submitted: deque[RequestHandle] = deque()  # of any thread, until the driving one feeds them
        self._driver = threading.Lock()
        self._closed = False
        self._threads = torch.get_num_threads()
        with ExitStack() as undo:
            self._workers = WorkerProcesses()
            undo.callback(self._workers.end)
            network = here.network or Loopback()
            self._plan = plan = None
            if isinstance(place, Here):
                self._plan = plan = LocalPlan(stages, self._workers.directory, network)
                undo.callback(plan.close)
                place = Connected(plan.addresses)
            addresses, watch, slow = place.addresses, place.watch, spec.slow
            pair = keys.load(addresses.key_file, addresses.public_key) if addresses.key_file else None
            self._transport = (
                EmulatedTransport(emulation, 0, addresses.instances, pair, addresses.unencrypted)
                if emulation else ZmqTransport(pair, unencrypted=addresses.unencrypted))
            undo.callback(self._transport.close)
            self._members = Membership(addresses.instances, spec.dead_after,
                                       fail_on_rejoin=spec.rejoin_within > 0, digests=addresses.digests)
            self._timing = ClusterTiming(emulation, stages, lambda kind: self._draft_models.pass_seconds(kind),
                                         ModelDir(model_dir).sparse)
            core = self._core = DraftCore(self._draft_session, time.monotonic, self.observer,
                                          self._highest_session, stages, self._timing.curve,
                                          spec.cache_rows, spec.at_once, spec.scheduling_policy)
            self._links = StageLinks(self._transport, addresses, network, self._members,
                                     lambda within: self._workers.exited(within) or watch(),
                                     self.observer.heartbeat, lambda session: core.find(session) is not None,
                                     core.charge)
            self._energy = SessionEnergy(spec.meter)
            self._loop = EventLoop(core, self._links, emulation, self.observer, self._energy, self._timing)
            self._recovery = Recovery(self._links, self._workers, spec.rejoin_within, self.observer, watch)
            if plan:
                emulate = self._workers.directory / "emulation.json" if emulation else None
                if emulation and emulate:
                    emulation.save(emulate)
                fair = spec.threads or share_of_cores(stages + 1, ModelDir(model_dir).size)  # D0 is one, too
                self._workers.start(plan.configs(self._links.control_endpoint, self._links.output_endpoint,
                                                 model_dir, cast(ComputeDtype, spec.dtype), fair or 0,
                                                 emulate, spec.device,
                                                 (spec.cache_rows or 0) if spec.reserve else 0, spec.at_once),
                                    wrap=network.command if here.network else None)
                undo.callback(torch.set_num_threads, self._threads)
                if fair:
                    torch.set_num_threads(fair)
                if not spec.rejoin_within:
                    plan.close()
            with slow():
                # In parallel with the stages' loading.
                self._draft_models = DraftModels(
                    model_dir, spec.dtype, spec.device, slow, (spec.cache_rows or 0) if spec.reserve else 0,
                    loaded=self.observer.drafter_loaded)
                core.pool.suit(self._draft_models.kinds, SESSIONS * spec.at_once)
            self._links.wait_for_hello(spec.start_within, place.waiting)
            with slow():
                core.warming_up = True
                self._timing.warm_up(self._run_alone)
                core.warming_up = False
            if spec.meter and spec.idle_s:
                over = time.monotonic() + spec.idle_s
                self._drive(lambda: time.monotonic() > over)
            undo.pop_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def pids(self) -> list[int]:
        """The stages' process ids, V1's first; empty if they were started elsewhere."""
        return self._workers.pids

    @property
    def busy(self) -> bool:
        return bool(self._submitted) or self._core.busy

    @property
    def status(self) -> ClusterStatus:
        return ClusterStatus(ClusterState.STOPPED) if self._closed else self._recovery.status

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        """Queue a request, from any thread; requests start oldest first. UsageError if the strategy exists in
        virtual time only; other errors come through the handle."""
        require_pipelines([request.strategy])
        return self._enqueue(request, on_tokens)

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request. UsageError if it does not fit; PeerLost if a stage is lost for good, which ends
        the cluster."""
        return self._answers([self.submit(request, on_tokens)])[0]

    def generate_many(self, requests: Sequence[Request]) -> list[Result]:
        """Run requests concurrently; results in their order, errors as in :meth:`generate`."""
        return self._answers([self.submit(request) for request in requests])

    def serve(self, stop: Callable[[], bool]) -> None:
        with self._driver:
            self._drive(stop)

    def _enqueue(self, request: Request, on_tokens: OnTokens | None = None) -> RequestHandle:
        if self._closed:
            raise FlowspecError(_CLOSED)
        handle = RequestHandle(request, on_tokens)
        self._submitted.append(handle)
        return handle

    def _answers(self, handles: list[RequestHandle]) -> list[Result]:
        """Return all results; drives the event loop unless another thread does."""
        def done() -> bool:
            return all(handle.done() for handle in handles)

        while not done():
            if self._driver.acquire(blocking=False):
                try:
                    self._drive(done)
                finally:
                    self._driver.release()
            else:
                futures.wait(handles, _CHECK_S)
        return [handle.result() for handle in handles]

    def _run_alone(self, request: Request) -> Stats:
        stats = self._answers([self._enqueue(request)])[0].stats
        self._core.pool.clear()
        return stats

    # ---- the driving thread --------------------------------------------------------------------

    def _drive(self, stop: Callable[[], bool]) -> None:
        make_current(self._device)
        self._energy.skip()  # since the last drive this process may have done other work
        first = True
        try:
            while not stop():
                if self._closed:
                    raise FlowspecError(_CLOSED)
                try:
                    if first:
                        first = False
                        self._loop.listen_again()
                    self._step()
                except PeerLost as error:
                    self._recovery.begin(error)  # raises it if recovery is not possible
                    self._loop.suspend(str(error))
        except FlowspecError as error:
            try:
                if self.status.state is ClusterState.RUNNING:
                    self.observer.lost(str(error), time.monotonic())
            finally:
                self._abandon(error)
                self.close()
            raise
        except BaseException as error:  # Ctrl-C, or a bug: the stages can go on
            self._abandon(error)
            raise

    def _step(self) -> None:
        self._feed_submitted()
        if self._recovery.status.state is ClusterState.RECOVERING:
            self._loop.carry_out()  # cancelled requests are answered meanwhile
            if not self._recovery.poll():
                return
            self._loop.resume()
            self._recovery.end()
        self._loop.step(_CHECK_S if self._core.sessions else _IDLE_S)

    def _feed_submitted(self) -> None:
        while self._submitted:
            self._core.feed(Submitted(self._submitted.popleft()))

    def _abandon(self, error: BaseException) -> None:
        self._feed_submitted()
        self._loop.abandon(error)

    def _highest_session(self) -> int:
        """Session numbers must exceed every number that a previous D0 used. The clock alone is not enough: it
        may be behind after a reboot."""
        return max(self._members.newest, int(time.time() * 1e3))

    def _draft_session(self, handle: RequestHandle, session: int, before: DraftSession | None
                       ) -> DraftSession:
        request = handle.request
        text = [*request.prompt, *(before.tokens if before else ())]
        prefix = self._core.pool.find(
            text, lambda cached: self._draft_models.can_share_drafter(cached.request, request))
        return self._draft_models.draft_session(
            request, len(self._members.instances), time.monotonic, session,
            lambda kind: self._timing.draft_passes(kind, request.params.segment),
            self._timing.slot_seconds(), predecessor=before, prefix=prefix, sparse=self._timing.sparse)

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes started here and close all sockets; idempotent. No thread may be driving."""
        if self._closed:
            return
        self._closed = True
        for instance in self._members.instances if self.pids else ():  # stages elsewhere stay up
            with suppress(PeerLost):
                self._links.shut_down(instance)
        torch.set_num_threads(self._threads)
        self._workers.wait(_SHUTDOWN_S)
        self._workers.end()
        if self._plan:
            self._plan.close()
        self._transport.close()

    def __enter__(self) -> ProcessCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
