"""A worker in a thread, D0's ends of its links, and engines whose ``compute`` can be held open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.drivers.stage.parts import Charge
from flowspec_edge.drivers.stage.sd_notify import Notifier
from flowspec_edge.drivers.stage.worker import Worker, connect
from flowspec_edge.messages import (
    Batch,
    Cancel,
    Close,
    Hello,
    Message,
    Open,
    Output,
    Payload,
    Prune,
    Segment,
)
from flowspec_edge.stage.engine import SegmentResult, StageEngine
from kits.memory_links import MemoryTransport

PATIENCE = 30.0  # seconds; only a failing test waits so long
T = TypeVar("T", bound=Message)


def segment(run: int, rows: int = 1, session: int = 1, first: int | None = None) -> Segment:
    """Rows of a chain that is committed as it is sent, as a prompt is."""
    start = run * rows if first is None else first
    numbers = np.arange(start, start + rows, dtype=np.int32)
    bits = np.packbits(np.tri(rows, dtype=np.uint8), axis=1, bitorder="little")
    return Segment(session=session, epoch=0, run=run, first=start, stop=start + rows, numbers=numbers,
                   positions=numbers, base=start, bits=bits, tokens=numbers % 50,
                   committed=np.arange(start - rows, start, dtype=np.int32) if run else np.empty(0, np.int32))


class HeldEngine:
    """``compute`` polls until the run is cancelled, like a pass with any number of layers."""

    cache_bytes = 0
    graph_sizes = 0

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.calls: list[Message] = []
        self.started = threading.Event()

    def counters_of(self, session: int) -> dict[str, float]:
        return self.counters

    def cached(self, session: int) -> int:
        return 0

    def open(self, message: Open) -> None:
        self.calls.append(message)

    def close(self, message: Close) -> None:
        self.calls.append(message)

    def prune(self, message: Prune) -> None:
        self.calls.append(message)

    def cancel(self, message: Cancel) -> None:
        self.calls.append(message)

    def admit(self, segment: Segment) -> Segment | None:
        return segment

    def compute(self, admitted: Sequence[Segment], poll: Callable[[], None] | None = None) -> list[SegmentResult]:
        assert poll is not None
        self.started.set()
        while not all(any(isinstance(call, Cancel) and one.run in call.runs for call in self.calls)
                      for one in admitted):
            poll()
        empty = Payload("float32", np.empty((0, 4), np.float32))
        return [SegmentResult([], Output(one.session, one.epoch, one.run, np.empty(0, np.int32), empty),
                              cancelled=True)
                for one in admitted]


@dataclass
class Stage:
    """A worker in a thread, and D0's ends of its links."""

    engine: StageEngine | HeldEngine
    network: MemoryTransport
    changes: dict[str, object] = field(default_factory=dict)
    notifier: Notifier | None = None
    charge: Charge | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        settings = {"instance": "v1", "stage": 1, "stages": 1, "model": "m", "control": "d0", "listen": "v1",
                    "next": "out", "heartbeat_s": 0.02, **self.changes}
        config = WorkerConfig.model_validate(settings)
        self.hub = self.network.hub("d0", "D0 control")
        self.output = self.network.pull("out", "D0 data in")
        links = connect(config, self.network)
        self.first = self.network.push("v1", "D0 data out")
        self.worker = Worker(config, links, self.engine, Hello("v1", 1, 1, (0, 2), "digest"),
                             self.notifier, charge=self.charge)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error

    def tell(self, message: Message) -> None:
        assert self.hub.send("v1", message)

    def give(self, message: Segment | Batch) -> None:
        assert self.first.send(message, PATIENCE)

    def hear(self, kind: type[T], where: Callable[[T], bool] = lambda message: True) -> T:
        """The next message of ``kind`` over control; others are passed over."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            item = self.hub.receive(PATIENCE)
            if item is not None and isinstance(item[1], kind) and where(item[1]):
                return item[1]
        raise AssertionError(f"no {kind.__name__} came")

    def result(self) -> Output:
        message = self.output.receive(PATIENCE)
        assert isinstance(message, Output)
        return message

    def ended(self) -> BaseException | None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.error


Start = Callable[..., Stage]  # an engine, and what differs from the usual configuration
