"""The state machine of one tensor-parallel rank.

All ranks must run the same rows in the same order, or a collective never returns.  Only the order of
segments is the same on every rank, so it alone decides: a session begins with its first segment, not with
its Open, and ends with the first segment of a session opened after its Close.  Prunes and cancels are hints
and ignored, and a pass that has begun is finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Cancel, Close, Open, Prune, Segment
from flowspec_edge.stage.engine import Poll, SegmentResult, StageEngine
from flowspec_edge.stage.tensor_parallel.process_group import ProcessGroup
from flowspec_edge.stage.tensor_parallel.shard import TensorShard

_POLL_S = 0.05  # interval of the polls while the rank computes
T = TypeVar("T")


class TensorEngine(StageEngine):
    """Runs one rank's shard."""

    def __init__(self, shard: TensorShard, group: ProcessGroup, cache_rows: int = 0) -> None:
        super().__init__(shard, cache_rows)
        self._group = group
        self._bytes_before = 0  # sent before the sessions that are open
        self._bytes: dict[int, int] = {}  # sent for each of them
        self._waiting: deque[Open | Close] = deque()  # until a session among them has a segment
        self._worker = _WorkerThread()

    @property
    def counters(self) -> dict[str, float]:
        """The stage engine's counters, and the bytes that the rank sent in collectives."""
        return {**super().counters, "collective_bytes": self._group.bytes_sent - self._bytes_before}

    def counters_of(self, session: int) -> dict[str, float]:
        return {**super().counters_of(session), "collective_bytes": self._bytes.get(session, 0)}

    def open(self, message: Open) -> None:
        """Remember the session until its first segment arrives."""
        self._waiting.append(message)

    def close(self, message: Close) -> None:
        """Deferred to a later session's first segment: this session may still have segments in transit."""
        self._waiting.append(message)

    def prune(self, message: Prune) -> None:
        """Ignored: ranks would see it between different segments, and drop different rows."""

    def cancel(self, message: Cancel) -> None:
        """Ignored, for the same reason."""

    def admit(self, segment: Segment) -> Segment | None:
        if segment.taps:
            raise ProtocolError(f"segment {segment.run} of session {segment.session} asks for taps; "
                                "tensor-parallel ranks send none")
        opened = [(o.session, o.epoch) for o in self._waiting if isinstance(o, Open)]
        if (segment.session, segment.epoch) in opened:
            while not self._begin(self._waiting.popleft(), segment):
                pass
        return super().admit(segment)

    def _begin(self, message: Open | Close, segment: Segment) -> bool:
        if isinstance(message, Close):
            super().close(message)
            return False
        super().open(message)
        self._bytes = {n: self._bytes.get(n, 0) for n in self.sessions if n != message.session}
        if not self._bytes:
            self._bytes_before = self._group.bytes_sent
        return (message.session, message.epoch) == (segment.session, segment.epoch)

    def compute(self, admitted: Sequence[Segment], poll: Poll | None = None) -> list[SegmentResult]:
        """Run all layers together with the other ranks; every rank gets the Outputs with all rows.

        ``poll`` is called every 50 ms, also during collectives; if it raises, the rank is unusable.  PeerLost
        if another rank is gone.
        """
        before, session, compute = self._group.bytes_sent, admitted[0].session, super().compute
        try:
            return self._worker.run(lambda: compute(admitted), poll)
        finally:
            self._bytes[session] = self._bytes.get(session, 0) + self._group.bytes_sent - before


_Item = tuple[Callable[[], Any], Future[Any]]


class _WorkerThread:
    """Runs calls one after another on one thread, since torch keeps a thread pool for each calling thread.

    A daemon thread, unlike an executor's, so that a collective that never returns does not keep the process
    alive.  It ends when this object is collected.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[_Item | None] = SimpleQueue()
        Thread(target=_serve, args=(self._work,), name="tensor-parallel", daemon=True).start()
        finalize(self, self._work.put, None).atexit = False

    def run(self, work: Callable[[], T], poll: Poll | None) -> T:
        future: Future[T] = Future()
        self._work.put((work, future))
        while not wait((future,), _POLL_S if poll else None).done:
            if poll is not None:
                poll()
        return future.result()


def _serve(queue: SimpleQueue[_Item | None]) -> None:
    while (item := queue.get()) is not None:  # no deadline: it comes when the engine is collected
        work, future = item
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del item, work, future  # they would keep the engine and its sockets alive
