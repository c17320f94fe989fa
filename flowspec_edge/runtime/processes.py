"""A cluster of processes over ZeroMQ: D0 here, the stages as children or on other hosts.

Knows how D0 drives a request in real time: what it sends over which link, and when a silence or
an exit ends the request.  Does not know what the coordinator decides.

The stages are a pipeline, or tensor-parallel ranks: the same chain of links, over which each rank
hands segments on as they came; the last one sends the outputs, as in a pipeline.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import torch

from flowspec_edge.errors import FlowspecError, PeerLost, ProtocolError, UsageError
from flowspec_edge.messages import (
    Cancel,
    Close,
    Credit,
    Failed,
    Heartbeat,
    Hello,
    Open,
    Output,
    Prune,
    Segment,
    Shutdown,
    Tap,
)
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.children import Children
from flowspec_edge.runtime.coordinator import Coordinator
from flowspec_edge.runtime.device0 import DraftDevice
from flowspec_edge.runtime.emulated_links import EmulatedTransport
from flowspec_edge.runtime.emulation import Emulation, rest
from flowspec_edge.runtime.local import Addresses, LocalPlan, Loopback, Site, fair_threads
from flowspec_edge.runtime.members import Members
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.runtime.workerconfig import Dtype
from flowspec_edge.stage.shard import stage_ranges
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.tensors import parse_dtype
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import ZmqTransport

log = logging.getLogger(__name__)

_LATE_SHARE = 0.02  # of the decode time, that all devices together may be late while emulating
_CHECK_S = 0.1  # how often exits and silences are looked for
_LAST_REPORT_S = 2.0  # how long the stages' final counters are waited for
_EXIT_S = 3.0  # how much later than its links a process that dies may be seen to exit
_WARM_UP_SEGMENTS = 6
_STALL_S = 120.0  # without any output while a request runs and all stages answer
_SHUTDOWN_S = 1.0  # how long a stage may take to end after Shutdown


class ProcessCluster:
    """Stages as processes; implements ``runtime.request.Cluster``.  One request at a time."""

    clock = "wall"

    def __init__(self, model_dir: Path, stages: int, dtype: str = "fp32", *,
                 parallelism: Parallelism = "pipeline", threads: int | None = None,
                 encrypted: bool = False, dead_after: float = 5.0, start_within: float = 180.0,
                 addresses: Addresses | None = None, site: Site | None = None,
                 emulation: Emulation | None = None,
                 watch: Callable[[], str | None] = lambda: None) -> None:
        """Start the stages, or meet those at ``addresses``, and wait until all have their shards.

        parallelism   how the stages share the model; one for the cluster's whole life
        threads       of torch in each stage and here; None shares the machine's cores among them.
                      While the cluster is up, for the whole of this process
        encrypted     CURVE on every link, with keys made for this cluster
        dead_after    seconds of silence after which a stage counts as lost
        start_within  seconds for all stages to say Hello
        site          where on this machine the devices are; loopback by default
        emulation     whose time all of them take; by default their own
        watch         says which of the stages at ``addresses`` has ended, and why, if that is known

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
        self._outbox: deque[Segment] = deque()
        self._session = 0
        self._check_at = 0.0
        self._emulation = emulation
        self._watch = watch
        self._late_s = 0.0  # D0's own work took so much longer than it should
        self._slot_s = 0.0
        self._pass_s: dict[str, float] = {}  # a draft pass, by the kind of draft model
        self._moved_at = 0.0
        self._closed = False
        self._threads = torch.get_num_threads()  # before it was a cluster's
        with ExitStack() as undo:
            self._children = Children()
            undo.callback(self._children.end)
            place = site or Loopback()
            plan = None if addresses else LocalPlan(stages, self._children.directory, encrypted, place)
            if plan:
                undo.callback(plan.close)
                addresses = plan.addresses
            assert addresses is not None
            pair = keys.load(addresses.key_file) if addresses.key_file else None
            self._transport = (EmulatedTransport(emulation, 0, addresses.instances, pair) if emulation
                               else ZmqTransport(pair))
            undo.callback(self._transport.close)
            allowed = addresses.worker_keys
            with place.entered(0):  # ZeroMQ's own thread stays where it was made
                self._hub = self._transport.hub(addresses.control, "D0 control", allowed)
                self._output = self._transport.pull(addresses.output, "D0 data in", allowed[-1:])
                self._first = self._transport.push(addresses.first, "D0 data out", allowed[:1])
            self._members = Members(addresses.instances, dead_after, alike=grouped)
            if plan:
                emulate = self._children.directory / "emulation.json" if emulation else None
                if emulation and emulate:
                    emulation.save(emulate)
                fair = threads or fair_threads(stages)
                self._children.start(plan.configs(self._hub.endpoint, self._output.endpoint, Path(model_dir),
                                                  cast(Dtype, dtype), fair, parallelism, emulate),
                                     within=place.command if site else None)
                undo.callback(torch.set_num_threads, self._threads)
                torch.set_num_threads(fair)
                plan.close()
            self._device0 = DraftDevice(Path(model_dir), dtype)  # while the stages load theirs
            self._gather(start_within)
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

    # ---- a request -----------------------------------------------------------------------------

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """Run one request to its end.

        UsageError if it cannot fit, or its strategy needs devices that share the model in another
        way; PeerLost, which ends the cluster, if a stage is lost.
        """
        chosen = strategy_class(request.strategy)
        if chosen.parallelism != self.parallelism:
            raise UsageError(f"strategy {chosen.name} runs on {_named(chosen.parallelism)}, but this cluster "
                             f"is {_named(self.parallelism)}; start one for it")
        return self._run(request, on_tokens)

    def _run(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        if self._closed:
            raise FlowspecError("the cluster is closed; start a new one")
        self._session = max(self._session + 1, int(time.time() * 1e3))  # above those of a former D0
        c = self._device0.coordinator(request, len(self._members.instances), time.monotonic, self._session,
                                      lambda kind: self._draft_passes(kind, request.params.segment))
        before, self._late_s = self._own_bytes(), 0.0
        try:
            self._collect(None)  # heartbeats since the last request
            self._moved_at = time.monotonic()
            self._members.expect_from(self._moved_at)
            self._tell_all(c.open_message())
            while not c.finished:
                self._step(c, on_tokens)
                if time.monotonic() - self._moved_at > _STALL_S:
                    raise PeerLost(f"no output for {_STALL_S:g} s, though every stage answers: a segment "
                                   "was lost; start the cluster again")
            self._end_session()
        except FlowspecError:
            self.close()
            raise
        except BaseException:  # Ctrl-C, or a fault of ours: the stages can go on
            self._outbox.clear()
            with suppress(PeerLost):
                self._tell_all(Close(self._session))
            raise
        stages = self._members.counters()
        total = self._own_bytes() - before + sum(
            int(counters.get(kind, 0)) for counters in stages for kind in ("bytes_out", "collective_bytes"))
        result = c.result(self._slot_s or _slowest(stages), total, stages)
        late = self._late_s + sum(counters.get("late_s", 0.0) for counters in stages)
        if len(result.tokens) > 1 and late > _LATE_SHARE * result.stats.decode_s:
            log.warning("emulation: this machine was too slow or too busy by %.2f s in %.2f s of decoding; "
                        "figures are too low", late, result.stats.decode_s)
        return result

    def _draft_passes(self, kind: str, rows: int) -> float:
        """How many draft passes a full segment's way through all stages takes."""
        if self._emulation:
            devices = self._emulation.devices
            latency = devices.latency_seconds(rows, self.parallelism)
            return latency / max(devices.d0.draft_seconds(kind), 1e-9)
        if kind not in self._pass_s:
            self._pass_s[kind] = self._device0.pass_seconds(kind)
        slots = len(self._members.instances) if self.parallelism == "pipeline" else 1
        return self._slot_s * slots / self._pass_s[kind]

    def _warm_up(self) -> None:
        """Run full segments through the pipeline: how long one takes in the slowest stage is a slot.

        So that a turn means the same for every strategy, however long its own segments are.
        """
        rows = Params().segment
        prompt = [0] * (rows * _WARM_UP_SEGMENTS)
        request = Request(prompt, "autoregressive", 1, params=Params(prefill_chunk=rows))
        self._slot_s = self._run(request).stats.slot_s

    def _step(self, c: Coordinator, on_tokens: OnTokens | None) -> None:
        """D0's loop: send what may be sent, do the most urgent work, take what has come."""
        for message in c.take_messages():
            if isinstance(message, Segment):
                self._outbox.append(message)
            else:
                self._tell_all(message)
        self._flush()
        task = c.next_task()
        if task is not None:
            start = time.perf_counter()
            c.complete(task)
            if self._emulation:
                self._late_s += rest(start, self._emulation.devices.task_seconds(c, task))
        if on_tokens and (new := c.new_tokens()):
            on_tokens(new)  # may block; what came meanwhile is read before anybody counts as silent
        if not self._collect(c) and task is None:
            self._sleep()
        self._check()

    # ---- messages ------------------------------------------------------------------------------

    def _collect(self, c: Coordinator | None) -> bool:
        """Take everything that has arrived; whether anything has."""
        found = False
        while (output := self._output.receive()) is not None:
            found = True
            self._moved_at = time.monotonic()
            if not isinstance(output, Output):
                raise ProtocolError(f"{self._output.name}: a {type(output).__name__} is no output")
            if c is not None:
                c.receive(output)
        while (item := self._hub.receive()) is not None:
            found = True
            sender, message = item
            match message:
                case Hello() | Heartbeat() | Failed():
                    self._members.heard(sender, message, time.monotonic())
                case Credit() | Tap():
                    if c is not None:
                        c.receive(message)
                case _:
                    raise ProtocolError(f"{self._hub.name}: {sender} sent a {type(message).__name__}")
        return found

    def _flush(self) -> None:
        while self._outbox and self._first.send(self._outbox[0]):
            self._outbox.popleft()

    def _tell_all(self, message: Open | Close | Prune | Cancel | Shutdown) -> None:
        for stage, instance in enumerate(self._members.instances, start=1):
            try:
                taken = self._hub.send(instance, message)
            except PeerLost as error:
                self._blame_exit(within=_EXIT_S)
                raise PeerLost(f"V{stage} has left the control channel; start the cluster again") from error
            if not taken:
                raise PeerLost(f"V{stage} takes no control messages any more; start the cluster again")

    def _sleep(self) -> None:
        due = max(0.0, self._check_at - time.monotonic())
        self._transport.wait([self._output, self._hub], [self._first] if self._outbox else [], due)

    def _end_session(self) -> None:
        """Close it, and wait a moment for every stage's last counters."""
        self._outbox.clear()
        self._tell_all(Close(self._session))
        deadline = time.monotonic() + _LAST_REPORT_S
        while not self._members.all_closed(self._session) and time.monotonic() < deadline:
            self._sleep()
            self._collect(None)
            self._check()

    # ---- life and death ------------------------------------------------------------------------

    def _check(self) -> None:
        """PeerLost if a stage has exited, fallen silent or lost its link."""
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        self._blame_exit()
        self._members.check(now)
        if self._first.breaks():
            self._blame_exit(within=_EXIT_S)
            raise PeerLost(f"{self._first.name}: the connection to V1 broke, segments may be lost; "
                           "start the cluster again")

    def _blame_exit(self, within: float = 0.0) -> None:
        cause = self._children.exited_within(within) or self._watch()
        if cause is not None:
            raise PeerLost(f"{cause}; start the cluster again")

    def _gather(self, within: float) -> None:
        """Wait until every stage has said Hello."""
        deadline = time.monotonic() + within
        while missing := self._members.missing():
            if time.monotonic() > deadline:
                raise PeerLost(f"no Hello from {', '.join(missing)} within {within:g} s: see whether they "
                               f"run, can reach D0 at {self._hub.endpoint} and hold the right keys")
            self._members.expect_from(time.monotonic())
            self._check()
            self._sleep()
            self._collect(None)

    def close(self) -> None:
        """End every process and socket of ours; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for instance in self._members.instances if self.pids else ():  # others' stages stay up
            with suppress(PeerLost):
                self._hub.send(instance, Shutdown("D0 closed the cluster"))
        torch.set_num_threads(self._threads)
        self._children.wait(_SHUTDOWN_S)
        self._children.end()
        self._transport.close()

    def __enter__(self) -> ProcessCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _own_bytes(self) -> int:
        """Bytes that D0 has sent, and those that came to it over the control channel."""
        return self._first.bytes_out + self._hub.bytes_out + self._hub.bytes_in


def _slowest(stages: tuple[dict[str, float], ...]) -> float:
    """Seconds that the slowest stage takes for a segment."""
    return max(counters.get("slot_s", 0.0) for counters in stages)


def _named(parallelism: Parallelism) -> str:
    return "a pipeline" if parallelism == "pipeline" else f"a {parallelism} group"
