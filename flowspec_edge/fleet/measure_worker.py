"""A worker that is started to be measured: V1 of a pipeline, and all that it is connected to is here.

Knows processes, links and patience.  Does not know what is sent, nor what is measured.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.fleet.board import resident_mb
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
from flowspec_edge.runtime.children import Children
from flowspec_edge.runtime.workerconfig import Dtype, WorkerConfig
from flowspec_edge.stage.shard import even_runs, load_config
from flowspec_edge.transport.zmq_links import ZmqTransport

PATIENCE_S = 120.0  # for a shard to load, and for a segment: a slow board may page in first
_CHECK_S = 0.5
_EXIT_S = 2.0

Answer = Segment | Output | Credit | Tap


class MeasuredWorker:
    """One process, V1 of ``stages``; what it would send to V2 and to D0 comes here."""

    def __init__(self, transport: ZmqTransport, undo: ExitStack, target: Path, stages: int, dtype: Dtype,
                 device: str, threads: int) -> None:
        """Start it; :meth:`ready` waits for it.  ``undo`` ends it."""
        low, high = even_runs(int(load_config(target).num_hidden_layers), stages)[0]
        self.layers = high - low
        self._transport = transport
        self._name = f"measured-{uuid.uuid4().hex[:8]}"
        self._hub = transport.hub("tcp://127.0.0.1:*", f"{self._name} control")
        self._output = transport.pull("tcp://127.0.0.1:*", f"{self._name} data out")
        self._children = Children()
        self._present = False
        self._check_at = 0.0
        self._quiet_since = time.monotonic()
        undo.callback(self._end)
        with socket.create_server(("127.0.0.1", 0)) as door:
            listen = f"tcp://127.0.0.1:{door.getsockname()[1]}"
            self._children.start([WorkerConfig(
                instance=self._name, stage=1, stages=stages, model=str(target), dtype=dtype, device=device,
                threads=threads, control=self._hub.endpoint, listen=listen, next=self._output.endpoint,
                listen_fd=door.fileno(), parent=os.getpid())])
        self._input = transport.push(listen, f"{self._name} data in")

    def ready(self) -> None:
        """Wait until it has its weights; PeerLost says why it did not come up."""
        self.receive()
        while not self._present:
            self.wait()
            self.receive()

    def send(self, message: Open | Segment | Prune | Cancel) -> None:
        """Over the link that is for it."""
        self._quiet_since = time.monotonic()
        if isinstance(message, Segment):
            self._input.send(message, PATIENCE_S)
        else:
            self._hub.send(self._name, message)

    def receive(self) -> Sequence[Answer]:
        """What has come; FlowspecError if the stage says that it failed, PeerLost if it has gone."""
        found: list[Answer] = []
        while (result := self._output.receive()) is not None:
            assert isinstance(result, Segment | Output)
            found.append(result)
        while (item := self._hub.receive()) is not None:
            match item[1]:
                case Failed(cause=cause):
                    raise FlowspecError(f"the stage that was started to be measured failed: {cause}")
                case Hello():
                    self._present = True
                case Credit() | Tap() as answer:
                    found.append(answer)
                case Heartbeat():
                    pass
        if found:
            self._quiet_since = time.monotonic()
        return found

    def wait(self) -> None:
        """Until something may have come; PeerLost if nothing does, or the process has ended."""
        self._transport.wait([self._output, self._hub], [], _CHECK_S)
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        if cause := self._children.exited():
            self.receive()  # it may have said why
            raise PeerLost(f"the stage that was started to be measured is gone: {cause}")
        if now - self._quiet_since > PATIENCE_S:
            raise PeerLost(f"the stage that was started to be measured has said nothing for {PATIENCE_S:g} s")

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._children.pids[0]

    def resident_mb(self) -> float | None:
        """Memory that the process holds, 10^6 bytes."""
        return resident_mb(self.pid)

    def _end(self) -> None:
        with suppress(PeerLost):
            self._hub.send(self._name, Shutdown("measured"))
        self._children.wait(_EXIT_S)
        self._children.end()
