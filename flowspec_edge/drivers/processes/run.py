"""One run of a cluster's processes: what D0 has from the start of its stages to their end."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from flowspec_edge.d0.core import DraftCore
from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.observer import Observers
from flowspec_edge.d0.request import RequestHandle
from flowspec_edge.d0.request_queue import RequestQueue
from flowspec_edge.d0.run_events import DrafterLoaded, HeartbeatArrived
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.drivers.observe.power import SessionEnergy, board_meter
from flowspec_edge.drivers.processes.addresses import LocalPlan, Loopback
from flowspec_edge.drivers.processes.event_loop import EventLoop
from flowspec_edge.drivers.processes.forkserver import STAGE
from flowspec_edge.drivers.processes.membership import Membership
from flowspec_edge.drivers.processes.recovery import Recovery
from flowspec_edge.drivers.processes.spec import ClusterSpec, Connected, Here
from flowspec_edge.drivers.processes.stage_links import StageLinks
from flowspec_edge.drivers.processes.subprocesses import WorkerProcesses
from flowspec_edge.drivers.processes.timing import ClusterTiming
from flowspec_edge.errors import PeerLost
from flowspec_edge.model.manifest import SESSIONS
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.shard import stage_ranges
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import ZmqTransport
from flowspec_edge.util.tensors import parse_dtype
from flowspec_edge.util.threads import share_of_cores

_SHUTDOWN_S = 1.0  # for a stage to end after Shutdown


class ProcessRun:
    """All fields are for the thread that drives the cluster, except ``recovery.status``."""

    def __init__(self, spec: ClusterSpec, backend: Here | Connected, observer: Observers, queue: RequestQueue
                 ) -> None:
        """Start the stages, or connect to them, and wait until all have loaded.

        Links to stages that are started here are encrypted, with keys made for this run. UsageError if the
        model cannot be cut into so many stages; then nothing is started. PeerLost if a stage does not start.
        """
        local = backend if isinstance(backend, Here) else Here()
        model, emulator = OpenModel(Path(spec.model)), local.emulator
        parse_dtype(spec.dtype)
        stage_ranges(model, spec.stages)
        self._threads = torch.get_num_threads()
        with ExitStack() as undo:
            self.workers = WorkerProcesses(emulator.program if emulator else STAGE)
            undo.callback(self.workers.end)
            network = local.network or Loopback()
            self.plan = plan = None
            if isinstance(backend, Here):
                self.plan = plan = LocalPlan(spec.stages, self.workers.directory, network)
                undo.callback(plan.close)
                backend = Connected(plan.addresses)
            addresses, watch, slow = backend.addresses, backend.watch, spec.slow
            pair = keys.load(addresses.key_file, addresses.public_key) if addresses.key_file else None
            self._transport = (
                emulator.transport(addresses.instances, pair, addresses.unencrypted) if emulator
                else ZmqTransport(pair, unencrypted=addresses.unencrypted))
            undo.callback(self._transport.close)
            self.members = Membership(addresses.instances, spec.dead_after,
                                      fail_on_rejoin=spec.rejoin_within > 0, digests=addresses.digests)
            self.timing = ClusterTiming(emulator, spec.stages,
                                        lambda kind: self.draft_models.pass_seconds(kind), model.sparse)
            core = self.core = DraftCore(self._draft_session, time.monotonic, observer,
                                         self._highest_session, spec.stages, self.timing.curve,
                                         spec.cache_rows, queue, spec.scheduling_policy)
            self.links = StageLinks(self._transport, addresses, network, self.members,
                                    lambda within: self.workers.exited(within) or watch(),
                                    lambda beat, at: observer.observe(HeartbeatArrived(at, beat)),
                                    lambda session: core.find(session) is not None,
                                    core.charge)
            local_meter = undo.enter_context(board_meter(spec.meter is None and emulator is None))
            self.meter = spec.meter or local_meter
            self.energy = SessionEnergy(self.meter)
            self.loop = EventLoop(core, self.links, emulator, observer, self.energy, self.timing)
            self.recovery = Recovery(self.links, self.workers, spec.rejoin_within, observer, watch)
            reserved = (spec.cache_rows or 0) if spec.reserve else 0
            if plan:
                if emulator:
                    emulator.prepare(self.workers.directory)
                fair = spec.threads or share_of_cores(spec.stages + 1, model.size)  # D0 is one, too
                self.workers.start(
                    plan.configs(self.links.control_endpoint, self.links.output_endpoint,
                                 model=str(spec.model), dtype=spec.dtype, threads=fair or 0,
                                 device=spec.device, cache_rows=reserved, requests=spec.at_once),
                    wrap=network.command if local.network else None)
                undo.callback(torch.set_num_threads, self._threads)
                if fair:
                    torch.set_num_threads(fair)
                if not spec.rejoin_within:
                    plan.close()
            with slow():
                # In parallel with the stages' loading.
                self.draft_models = DraftModels(model, spec.dtype, spec.device, slow, reserved,
                                                loaded=lambda sizes: observer.observe(DrafterLoaded(sizes)))
                core.pool.suit(self.draft_models.kinds, SESSIONS * spec.at_once)
            self.links.wait_for_hello(spec.start_within, backend.waiting)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """End the processes started here and close all sockets. No thread may be driving."""
        for instance in self.members.instances if self.workers.pids else ():  # stages elsewhere stay up
            with suppress(PeerLost):
                self.links.shut_down(instance)
        self.workers.wait(_SHUTDOWN_S)
        self._undo.close()

    def _highest_session(self) -> int:
        """Session numbers must exceed every number that a previous D0 used.

        The clock alone is not enough: it may be behind after a reboot.
        """
        return max(self.members.newest, int(time.time() * 1e3))

    def _draft_session(self, handle: RequestHandle, session: int, before: DraftSession | None
                       ) -> DraftSession:
        request = handle.request
        text = [*request.prompt, *(before.tokens if before else ())]
        prefix = self.core.pool.find(
            text, lambda cached: self.draft_models.can_share_drafter(cached.request, request))
        return self.draft_models.draft_session(
            request, len(self.members.instances), time.monotonic, session,
            lambda kind: self.timing.draft_passes(kind, request.params.segment),
            self.timing.slot_seconds(), predecessor=before, prefix=prefix, sparse=self.timing.sparse,
            carries=True, prompts=self.timing.prompt_curve(self.members.accepted_prompt_rows))
