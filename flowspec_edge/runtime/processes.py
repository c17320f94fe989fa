"""A cluster of processes over ZeroMQ: D0 here, the stages as children or on other hosts.

Knows how the stages are started, met and ended, and who may drive them.  Does not know how requests
are answered (``request_loop``) or what the coordinators decide.

The stages are a pipeline, or tensor-parallel ranks: the same chain of links, over which each rank
hands segments on as they came; the last one sends the outputs, as in a pipeline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import torch

from flowspec_edge.errors import FlowspecError, PeerLost, UsageError
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.children import Children
from flowspec_edge.runtime.coordinator import Coordinator
from flowspec_edge.runtime.device0 import DraftDevice
from flowspec_edge.runtime.emulated_links import EmulatedTransport
from flowspec_edge.runtime.emulation import Emulation
from flowspec_edge.runtime.local import Addresses, LocalPlan, Loopback, Site, fair_threads
from flowspec_edge.runtime.members import Members
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.rejoin import Rejoin
from flowspec_edge.runtime.request import OnTokens, Request, Result, Stats
from flowspec_edge.runtime.request_loop import RequestLoop
from flowspec_edge.runtime.slot_curve import WARM_UP_ROWS, SlotCurve
from flowspec_edge.runtime.stage_links import StageLinks
from flowspec_edge.runtime.tickets import Ticket
from flowspec_edge.runtime.workerconfig import Dtype
from flowspec_edge.stage.shard import stage_ranges
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.tensors import parse_dtype
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import ZmqTransport

_CHECK_S = 0.1  # how long a thread waits for another one's request before it looks whether to drive
_IDLE_S = 0.02  # within which a request is begun that comes while there is none
_WARM_UP_SEGMENTS = 6
_ROUND_TRIPS = 3  # of a segment of each size by which links are measured; the fastest counts
_SHUTDOWN_S = 1.0  # how long a stage may take to end after Shutdown


class ProcessCluster:
    """Stages as processes; implements ``runtime.request.SharedCluster``.

    Any thread may hand requests in; one at a time drives: it sends, computes and listens for all.
    """

    clock = "wall"

    def __init__(self, model_dir: Path, stages: int, dtype: str = "fp32", *, device: str = "cpu",
                 parallelism: Parallelism = "pipeline", threads: int | None = None,
                 encrypted: bool = False, dead_after: float = 5.0, start_within: float = 180.0,
                 addresses: Addresses | None = None, site: Site | None = None,
                 emulation: Emulation | None = None, at_once: int = 8, cache_rows: int | None = None,
                 rejoin_within: float = 0.0, watch: Callable[[], str | None] = lambda: None,
                 waiting: Callable[[list[str]], None] = lambda stages: None,
                 observer: Observer | None = None) -> None:
        """Start the stages, or meet those at ``addresses``, and wait until all have their shards.

        device        torch's, on which D0 computes, and so do stages that are started here
        parallelism   how the stages share the model; one for the cluster's whole life
        threads       of torch in each stage and here; None shares the machine's cores among them.
                      While the cluster is up, for the whole of this process
        encrypted     CURVE on every link, with keys made for this cluster
        dead_after    seconds of silence after which a stage counts as lost
        start_within  seconds for all stages to say Hello
        site          where on this machine the devices are; loopback by default
        emulation     whose time all of them take; by default their own
        at_once       requests that share the stages at a time, each with a cache of its own; the others wait
        cache_rows    rows that a stage's caches may hold at a time (``coordinator.cache_rows``): requests
                      wait for room, and what is left keeps texts for requests that begin with them.
                      None: any number, and nothing is kept
        rejoin_within seconds for a lost stage to be back: open requests wait for it and go on.  Stages
                      that were started here are started anew, others waited for; tensor-parallel ranks
                      at ``addresses`` are not.  With 0 the loss of a stage ends the cluster
        watch         says which of the stages at ``addresses`` has ended, and why, if that is known and
                      nobody starts it again
        waiting       called with the stages that have yet to say Hello ("V1", …), again and again
        observer      is told what happens

        UsageError if the model cannot be cut into so many stages, or encryption is not to be had,
        before anything is started; PeerLost if a stage does not come up.
        """
        parse_dtype(dtype)
        grouped = parallelism != "pipeline"
        stage_ranges(ModelDir(Path(model_dir)).stages, stages, allow_empty=grouped)
        if grouped and encrypted:
            raise UsageError(f"{parallelism}: collectives cannot be encrypted; "
                             "use a pipeline, or a network that you trust")
        self.parallelism = parallelism
        self._emulation = emulation
        # Under emulation a profile tells; a group computes every segment with all devices.
        self._curve = None if emulation or grouped else SlotCurve()
        self._pass_s: dict[str, float] = {}  # a draft pass, by the kind of draft model
        self._at_once = at_once
        self.observer = observer or Observer()
        self._inbox: deque[Ticket] = deque()
        self._driver = threading.Lock()
        self._closed = False
        self._threads = torch.get_num_threads()  # before it was a cluster's
        with ExitStack() as undo:
            self._children = Children()
            undo.callback(self._children.end)
            place = site or Loopback()
            plan = None if addresses else LocalPlan(stages, self._children.directory, encrypted, place)
            self._plan = plan
            if plan:
                undo.callback(plan.close)
                addresses = plan.addresses
            assert addresses is not None
            pair = keys.load(addresses.key_file) if addresses.key_file else None
            self._transport = (
                EmulatedTransport(emulation, 0, addresses.instances, pair, addresses.unencrypted)
                if emulation else ZmqTransport(pair, unencrypted=addresses.unencrypted))
            undo.callback(self._transport.close)
            self._members = Members(addresses.instances, dead_after, alike=grouped, once=rejoin_within > 0,
                                    digests=addresses.digests)
            self._links = StageLinks(self._transport, addresses, place, self._members,
                                     lambda within: self._children.exited_within(within) or watch(),
                                     self.observer.heard)
            self._loop = RequestLoop(self._links, self._coordinator, emulation, self.observer, cache_rows,
                                     self._curve)
            self._rejoin = Rejoin(self._links, self._children, rejoin_within if plan or not grouped else 0.0,
                                  self.observer, watch, plan.new_group if plan and grouped else None)
            if plan:
                emulate = self._children.directory / "emulation.json" if emulation else None
                if emulation and emulate:
                    emulation.save(emulate)
                fair = threads or fair_threads(stages)
                self._children.start(plan.configs(self._links.control_endpoint, self._links.output_endpoint,
                                                  Path(model_dir), cast(Dtype, dtype), fair, parallelism,
                                                  emulate, device),
                                     within=place.command if site else None)
                undo.callback(torch.set_num_threads, self._threads)
                torch.set_num_threads(fair)
                if not rejoin_within:
                    plan.close()
            self._device0 = DraftDevice(Path(model_dir), dtype, device)  # while the stages load theirs
            self._gather(start_within, waiting)
            self._warm_up()
            undo.pop_all()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or ended by the loss of a stage."""
        return self._closed

    @property
    def pids(self) -> list[int]:
        """The stages' process ids, V1's first; none if they run elsewhere."""
        return self._children.pids

    @property
    def busy(self) -> bool:
        """Whether a request is open, or waits to be begun."""
        return bool(self._inbox) or self._loop.busy

    @property
    def trouble(self) -> str | None:
        """What was lost, and is waited for; from any thread."""
        return None if self._closed else self._rejoin.trouble

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> Ticket:
        """Hand a request in, from any thread; it is answered while somebody drives (:meth:`serve`).

        Several requests share the stages, the oldest first.  UsageError if its strategy needs
        devices that share the model in another way; what else is wrong comes with the ticket.
        """
        chosen = strategy_class(request.strategy)
        if chosen.parallelism != self.parallelism:
            raise UsageError(f"strategy {chosen.name} runs on {_named(chosen.parallelism)}, but this cluster "
                             f"is {_named(self.parallelism)}; start one for it")
        return self._hand_in(request, on_tokens)

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request to its end.

        UsageError if it cannot fit, or its strategy needs devices that share the model in another
        way; PeerLost, which ends the cluster, if a stage is lost for good.
        """
        return self._answers([self.submit(request, on_tokens)])[0]

    def generate_many(self, requests: Sequence[Request]) -> list[Result]:
        """Run requests beside one another; the results in their order, errors as of :meth:`generate`."""
        return self._answers([self.submit(request) for request in requests])

    def serve(self, stop: Callable[[], bool]) -> None:
        """Answer what is submitted until ``stop()``, asked often, is true; what is not answered then
        goes on when somebody drives again.

        Whatever ends it otherwise ends all open requests, too: FlowspecError (PeerLost and others),
        which closes the cluster.
        """
        with self._driver:
            self._drive(stop)

    def _hand_in(self, request: Request, on_tokens: OnTokens | None = None) -> Ticket:
        if self._closed:
            raise FlowspecError("the cluster is closed; start a new one")
        ticket = Ticket(request, on_tokens)
        self._inbox.append(ticket)
        return ticket

    def _answers(self, tickets: list[Ticket]) -> list[Result]:
        """Of all of them; drives unless another thread does."""
        def done() -> bool:
            return all(ticket.done for ticket in tickets)

        while not done():
            if self._driver.acquire(blocking=False):
                try:
                    self._drive(done)
                finally:
                    self._driver.release()
            else:
                next(ticket for ticket in tickets if not ticket.done).wait(_CHECK_S)
        return [ticket.result() for ticket in tickets]

    def _drive(self, stop: Callable[[], bool]) -> None:
        try:
            while not stop():
                if self._closed:
                    raise FlowspecError("the cluster is closed; start a new one")
                try:
                    self._turn()
                except PeerLost as error:
                    self._rejoin.lost(error)  # raises it, if that is the end
                    self._loop.set_aside(str(error))
        except FlowspecError as error:
            try:
                if not self._closed and self._rejoin.trouble is None:
                    self.observer.lost(str(error), time.monotonic())
            finally:
                self._give_up(error)
                self.close()
            raise
        except BaseException as error:  # Ctrl-C, or a fault of ours: the stages can go on
            self._give_up(error)
            raise

    def _turn(self) -> None:
        """Go on by a step, or look whether the stages are back."""
        for ticket in [ticket for ticket in list(self._inbox) if ticket.cancelled]:
            self._inbox.remove(ticket)
            ticket.give_up()
        if self._rejoin.trouble is not None:
            if not self._rejoin.wait():
                self._loop.answer_cancelled()
                return
            self._loop.resume()
            self._rejoin.over()
        while (self._inbox and self._loop.open < self._at_once
               and self._loop.has_room(self._inbox[0].request)):  # nobody overtakes
            self._loop.start(self._inbox.popleft())
        self._loop.step(_CHECK_S if self._loop.busy else _IDLE_S)

    def _give_up(self, error: BaseException) -> None:
        self._loop.abandon(error)
        while self._inbox:
            self._inbox.popleft().settle(error)

    def _coordinator(self, ticket: Ticket, session: int, before: Coordinator | None) -> Coordinator:
        request = ticket.request
        reuse = None if before else self._loop.pool.find(
            request.prompt, lambda prefix: self._device0.drafts_alike(prefix.request, request))
        return self._device0.coordinator(
            request, len(self._members.instances), time.monotonic, session,
            lambda kind: self._draft_passes(kind, request.params.segment),
            self._slot_seconds(), before=before, reuse=reuse)

    def _slot_seconds(self) -> Callable[[int], float] | None:
        """What a segment takes by its rows, as far as that is told or learned."""
        if self._emulation:
            return self._emulation.devices.occupied_seconds
        return self._curve.seconds if self._curve else None

    def _draft_passes(self, kind: str, rows: int) -> float:
        """How many draft passes a full segment's way through all stages takes."""
        if self._emulation:
            devices = self._emulation.devices
            latency = devices.latency_seconds(rows, self.parallelism)
            return latency / max(devices.d0.draft_seconds(kind), 1e-9)
        if kind not in self._pass_s:
            self._pass_s[kind] = self._device0.pass_seconds(kind)
        slots = len(self._members.instances) if self.parallelism == "pipeline" else 1
        return self._loop.slot_s * slots / self._pass_s[kind]

    def _warm_up(self) -> None:
        """Run full segments through the pipeline: how long one takes in the slowest stage is a slot.

        So that a turn means the same for every strategy, however long its own segments are.  Where the
        stages' curve is learned, shorter and longer ones give it a start, and tell what a row takes over
        a link, on average.
        """
        self._loop.warming_up = True
        full = Params().segment
        slot_s = self._read_in(full, _WARM_UP_SEGMENTS).slot_s
        if self._curve:
            shortest, longest = min(WARM_UP_ROWS), max(WARM_UP_ROWS)
            ways = [min(self._way(rows) for _ in range(_ROUND_TRIPS)) for rows in (longest, shortest)]
            hops = len(self._members.instances)
            self._curve.link_row_s = max(0.0, ways[0] - ways[1]) / (longest - shortest) / hops
        self._loop.warming_up = False
        self._loop.slot_s = slot_s

    def _way(self, rows: int) -> float:
        """What a segment of ``rows`` rows takes from D0 to D0 beside the stages' computing, in seconds;
        some of it is the same for any number of rows."""
        stats = self._read_in(rows, 1)
        return stats.ttft_s - sum(stage.get("compute_s", 0.0) for stage in stats.stages)

    def _read_in(self, rows: int, segments: int) -> Stats:
        """A prompt of so many segments of ``rows`` rows; the figures, with this request's own slot."""
        request = Request([0] * (rows * segments), "autoregressive", 1, params=Params(prefill_chunk=rows))
        stats = self._answers([self._hand_in(request)])[0].stats
        self._loop.pool.clear()  # nobody goes on with this
        return stats

    # ---- life and death ------------------------------------------------------------------------

    def _gather(self, within: float, waiting: Callable[[list[str]], None]) -> None:
        """Wait until every stage has said Hello."""
        deadline = time.monotonic() + within
        while missing := self._members.missing():
            waiting(missing)
            if time.monotonic() > deadline:
                raise PeerLost(f"no Hello from {', '.join(missing)} within {within:g} s: see whether they "
                               f"run, can reach D0 at {self._links.control_endpoint} and hold the right keys")
            self._links.expect_from_now()
            self._links.check()
            self._links.sleep()
            self._links.collect(lambda message: None)

    def close(self) -> None:
        """End every process and socket of ours; safe to call twice.  A thread that drives must have
        stopped before."""
        if self._closed:
            return
        self._closed = True
        for instance in self._members.instances if self.pids else ():  # others' stages stay up
            with suppress(PeerLost):
                self._links.shut_down(instance)
        torch.set_num_threads(self._threads)
        self._children.wait(_SHUTDOWN_S)
        self._children.end()
        if self._plan:
            self._plan.close()
        self._transport.close()

    def __enter__(self) -> ProcessCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _named(parallelism: Parallelism) -> str:
    return "a pipeline" if parallelism == "pipeline" else f"a {parallelism} group"
