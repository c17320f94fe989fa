"""Measures a stage's time for a segment: a real worker process as V1, with this module as D0 and V2.

The times are round trips and include all that a worker adds to its layers: waking up, decoding, checks,
polling the control channel between layers, and encoding.  The workers' own reports (``Computed``) would leave
these out; and a local cluster would hold the whole target, for which a board may not have the memory.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from flowspec_edge.boards.measurement.fit import SegmentCase, trimmed_mean
from flowspec_edge.boards.measurement.link import spin
from flowspec_edge.boards.planning.model_size import ModelBytes
from flowspec_edge.boards.probe.board import resident_mb
from flowspec_edge.drivers.processes.subprocesses import WorkerProcesses
from flowspec_edge.drivers.ring import Ring
from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.messages import (
    Cancel,
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
from flowspec_edge.model.manifest import ComputeDtype
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.shard import even_runs
from flowspec_edge.transport.zmq_links import ZmqTransport
from flowspec_edge.tree.segment_builder import SegmentBuilder

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 512, 1500)
_CHUNK = 64  # prompt tokens a segment
CAPACITY_BEYOND = 3 * max(ROWS) + _CHUNK  # rows of a session besides its text
_SWEEPS = 2  # over all row counts, before the context grows
_PAUSE_S = 0.002  # about what D0 takes between an output and the next segment
_SHARE = 0.4  # of the usable memory, for the measured stages

_TIMEOUT_S = 120.0  # for a shard to load and for a segment: a slow board may page in first
_CHECK_S = 0.5
_EXIT_S = 2.0

WorkerMessage = Output | Credit | Tap


class MeasuredWorker:
    """A worker process, V1 of ``stages`` stages, whose links to D0 and V2 end in this process."""

    def __init__(self, transport: ZmqTransport, cleanup: ExitStack, target: Path, stages: int,
                 dtype: ComputeDtype, device: str, threads: int) -> None:
        """Start the process; ``cleanup`` ends it."""
        low, high = even_runs(OpenModel(target).layers, stages)[0]
        self.layers = high - low
        self._transport = transport
        self._name = f"measured-{uuid.uuid4().hex[:8]}"
        self._hub = transport.hub("tcp://127.0.0.1:*", f"{self._name} control")
        self._output = transport.pull("tcp://127.0.0.1:*", f"{self._name} data out")
        self._children = WorkerProcesses()
        self._present = False
        self.runs_graphs = False  # once a heartbeat has said so
        self._check_at = 0.0
        self._quiet_since = time.monotonic()
        cleanup.callback(self._end)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listen = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            ring = Ring(self._hub.endpoint, [self._output.endpoint, listen], [self._name])
            self._children.start([ring.config(
                1, stages=stages, model=str(target), dtype=dtype, device=device, threads=threads,
                listen_fd=listener.fileno(), parent=os.getpid())])
        self._input = transport.push(listen, f"{self._name} data in")

    def ready(self) -> None:
        """Wait until the weights are loaded; PeerLost if the worker does not start."""
        self.receive()
        while not self._present:
            self.wait()
            self.receive()

    def send(self, message: Open | Segment | Prune | Cancel) -> None:
        self._quiet_since = time.monotonic()
        if isinstance(message, Segment):
            self._input.send(message, _TIMEOUT_S)
        else:
            self._hub.send(self._name, message)

    def receive(self) -> Sequence[WorkerMessage]:
        """Receive what the stage has sent; raise FlowspecError if it reports a failure."""
        messages: list[WorkerMessage] = []
        while (result := self._output.receive()) is not None:
            assert isinstance(result, Segment | Output)
            if isinstance(result, Segment):  # for V2
                assert result.hidden is not None
                result = Output(result.session, result.epoch, result.run, result.numbers, result.hidden)
            messages.append(result)
        while (item := self._hub.receive()) is not None:
            match item[1]:
                case Failed(cause=cause):
                    raise FlowspecError(f"the stage under measurement failed: {cause}")
                case Hello():
                    self._present = True
                case Credit() | Tap() as answer:
                    messages.append(answer)
                case Heartbeat(counters=counters):
                    self.runs_graphs = counters.get("graph_sizes", 0) > 0
        if messages:
            self._quiet_since = time.monotonic()
        return messages

    def wait(self) -> None:
        """Wait briefly for a message; PeerLost after a long silence or the end of the process."""
        self._transport.wait([self._output, self._hub], [], _CHECK_S)
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        if cause := self._children.exited():
            self.receive()  # raises the cause if the stage reported one
            raise PeerLost(f"the stage under measurement has ended: {cause}")
        if now - self._quiet_since > _TIMEOUT_S:
            raise PeerLost(f"the stage under measurement has sent nothing for {_TIMEOUT_S:g} s")

    def resident_mb(self) -> float | None:
        return resident_mb(self._children.pids[0])

    def _end(self) -> None:
        with suppress(PeerLost):
            self._hub.send(self._name, Shutdown("measured"))
        self._children.wait(_EXIT_S)
        self._children.end()


def choose_stage_counts(model: ModelBytes, usable_mb: float) -> list[int]:
    """Choose numbers of stages such that V1 has two different numbers of layers.

    The larger V1 has half of the layers, or as many as fit in a share of the memory next to the smaller V1,
    which has a quarter as many.  One number if V1 can only have one layer.  Raise FlowspecError if that does not
    fit.
    """
    if model.layer > usable_mb * 1e6:
        raise FlowspecError(f"a layer takes {model.layer / 1e6:.0f} MB, and only {usable_mb:.0f} MB of "
                            "memory are free: end other processes")
    if model.layers <= 2:
        return list(range(1, model.layers + 1))
    longest = {stages: even_runs(model.layers, stages)[0][1] for stages in range(2, model.layers + 1)}
    for stages, large in longest.items():
        small = min(longest, key=lambda s: (abs(longest[s] - max(1, large // 4)), s))
        if (large + longest[small]) * model.layer <= usable_mb * 1e6 * _SHARE:
            return [stages, small] if large > longest[small] else [stages]
    return [model.layers]


class MeasuredStage:
    def __init__(self, transport: ZmqTransport, cleanup: ExitStack, target: Path, stages: int,
                 dtype: ComputeDtype, device: str, threads: int) -> None:
        self.worker = MeasuredWorker(transport, cleanup, target, stages, dtype, device, threads)
        self.layers = self.worker.layers
        self._vocabulary = int(OpenModel(target).config["vocab_size"])
        self._session = 0

    def open(self, capacity: int) -> None:
        self._session += 1
        self._builder = SegmentBuilder(self._session)
        self._text = 0  # tokens
        self._root: int | None = None  # number of the newest tree's root, if nothing was sent after it
        self.worker.send(Open(self._session, 0, capacity))

    def prefill(self, tokens: int) -> None:
        """Prefill until ``tokens`` tokens are cached."""
        self._root = None
        parent = -1
        while self._text < tokens:
            for _ in range(min(_CHUNK, tokens - self._text)):
                parent = self._add(self._text, parent, committed=True)
                self._text += 1
            self._exchange()

    def tree(self, rows: int) -> float:
        """Measure the seconds from sending ``rows`` nodes of a binary tree below the text to the result.

        The previous tree's root is committed first, so that no two segments have the same context: libraries
        cannot reuse what they cached for a shape.
        """
        if self._root is not None:
            self._builder.commit(self._root)
            self._text += 1
        numbers: list[int] = []
        for i in range(rows):
            depth = (i + 1).bit_length() - 1
            numbers.append(self._add(self._text + depth, numbers[(i - 1) // 2] if i else -1))
        self._root = numbers[0]
        return self._exchange()

    def _add(self, position: int, parent: int, committed: bool = False) -> int:
        token = (self._builder.next_number * 7919 + 13) % self._vocabulary
        return self._builder.add(token, position, parent, committed)

    def _exchange(self) -> float:
        segment = self._builder.seal()
        self._builder.pop_returned(segment.run)
        start = time.perf_counter()
        self.worker.send(segment)
        seconds, credit = 0.0, False
        while not (seconds and credit):
            self.worker.wait()
            for answer in self.worker.receive():
                if isinstance(answer, Credit):
                    credit = True
                else:
                    seconds = time.perf_counter() - start
        return seconds


def sample(stages: Sequence[MeasuredStage], contexts: Sequence[int], seconds: float,
           advance: Callable[[float], None]) -> dict[SegmentCase, float]:
    """Measure the mean seconds of every case, from sending a segment to its result.

    Half of the segments follow at once, as in a full pipeline; half after a pause, when the stage sleeps and
    its caches are cold.  Cases repeat in turn, so that disturbances affect all alike, for about ``seconds``,
    at least twice after a warm-up round.  ``advance`` gets the share of the time that has passed.
    """
    times: dict[SegmentCase, list[float]] = {}
    start = time.monotonic()
    rounds = 0
    while rounds < 3 or time.monotonic() - start < seconds:
        for stage in stages:
            stage.open(contexts[-1] + CAPACITY_BEYOND)
        for context in contexts:
            for stage in stages:
                stage.prefill(context)
            for sweep in range(_SWEEPS):
                for rows in ROWS:
                    for stage in stages:
                        if sweep % 2:
                            spin(_PAUSE_S)
                        duration = stage.tree(rows)
                        if rounds:
                            times.setdefault(SegmentCase(stage.layers, rows, context), []).append(duration)
        rounds += 1
        advance(min(1.0, (time.monotonic() - start) / seconds))
    return {case: trimmed_mean(seconds_of_case) for case, seconds_of_case in times.items()}
