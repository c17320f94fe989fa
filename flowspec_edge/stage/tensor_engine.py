"""The state machine of one tensor-parallel rank: a stage engine that never disagrees with the others.

All ranks must run the same rows in the same order, or a collective waits for ever.  So only what is
in segments counts, which come to every rank in one order: a session begins with its first segment,
not when its Open arrives, and ends with the first segment of one that was opened after its Close;
prunes and cancels, which are hints, are ignored; and what has been begun is finished.  Knows that a
collective may wait for long, and lets the caller go on meanwhile.  Does not know how ranks are
connected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Cancel, Close, Open, Output, Prune, Segment, Tap
from flowspec_edge.stage.engine import Poll, StageEngine
from flowspec_edge.stage.tensor_group import Group
from flowspec_edge.stage.tensor_shard import TensorShard

_POLL_S = 0.05  # how often the caller is called back while the rank computes
T = TypeVar("T")


class TensorEngine:
    """Runs one rank's shard; the calls and their order are those of a StageEngine."""

    def __init__(self, shard: TensorShard, group: Group) -> None:
        self._engine = StageEngine(shard)
        self._group = group
        self._bytes_before = 0  # sent before the sessions that are open
        self._bytes: dict[int, int] = {}  # sent for each of them
        self._waiting: deque[Open | Close] = deque()  # until a segment of a session among them comes
        self._lane = _Lane()

    @property
    def counters(self) -> dict[str, float]:
        """The stage engine's, and the bytes that the rank sent in collectives."""
        return {**self._engine.counters, "collective_bytes": self._group.bytes_sent - self._bytes_before}

    def counters_of(self, session: int) -> dict[str, float]:
        """One session's share of :attr:`counters`."""
        return {**self._engine.counters_of(session), "collective_bytes": self._bytes.get(session, 0)}

    @property
    def cache_bytes(self) -> int:
        """See :class:`StageEngine`."""
        return self._engine.cache_bytes

    def cached(self, session: int) -> int:
        """See :class:`StageEngine`."""
        return self._engine.cached(session)

    def open(self, message: Open) -> None:
        """Remember the session until its first segment is here."""
        self._waiting.append(message)

    def close(self, message: Close) -> None:
        """Nothing yet: a segment may be on its way that other ranks have begun.  The cache stays as it is
        until the first segment of a session opened later, which comes after all of this one's."""
        self._waiting.append(message)

    def prune(self, message: Prune) -> None:
        """Nothing: ranks would see it between different segments, and drop different rows."""

    def cancel(self, message: Cancel) -> None:
        """Nothing, for the same reason."""

    def admit(self, segment: Segment) -> Segment | None:
        """See :class:`StageEngine`; the same on every rank for the same segments."""
        if segment.taps:
            raise ProtocolError(f"segment {segment.run} of session {segment.session} wants taps; "
                                "tensor-parallel ranks send none")
        opened = [(o.session, o.epoch) for o in self._waiting if isinstance(o, Open)]
        if (segment.session, segment.epoch) in opened:
            while not self._begin(self._waiting.popleft(), segment):
                pass
        return self._engine.admit(segment)

    def _begin(self, message: Open | Close, segment: Segment) -> bool:
        """Start a session, or end one; whether that of ``segment`` has been started."""
        if isinstance(message, Close):
            self._engine.close(message)
            return False
        self._engine.open(message)
        self._bytes = {n: self._bytes.get(n, 0) for n in self._engine.sessions if n != message.session}
        if not self._bytes:
            self._bytes_before = self._group.bytes_sent
        return (message.session, message.epoch) == (segment.session, segment.epoch)

    def compute(self, admitted: Segment, poll: Poll | None = None) -> tuple[list[Tap], Segment | Output]:
        """Run all layers together with the other ranks; the Output, with all rows, on every one.

        ``poll`` is called every now and then, also while the others are waited for; if it raises,
        the rank must not be used again.  PeerLost if another rank is gone.
        """
        before, session = self._group.bytes_sent, admitted.session
        try:
            return self._lane.run(lambda: self._engine.compute(admitted), poll)
        finally:
            self._bytes[session] = self._bytes.get(session, 0) + self._group.bytes_sent - before


_Item = tuple[Callable[[], Any], Future[Any]]


class _Lane:
    """A thread that does one thing after another: always the same one, for torch keeps a pool of
    workers for each.  It does not keep the process alive when a collective never returns, and ends
    with its lane."""

    def __init__(self) -> None:
        self._work: SimpleQueue[_Item | None] = SimpleQueue()
        Thread(target=_serve, args=(self._work,), name="tensor-parallel", daemon=True).start()
        finalize(self, self._work.put, None).atexit = False

    def run(self, work: Callable[[], T], poll: Poll | None) -> T:
        """The result of ``work``, or what it raised; ``poll`` is called while it runs."""
        future: Future[T] = Future()
        self._work.put((work, future))
        while not wait((future,), _POLL_S if poll else None).done:
            if poll is not None:
                poll()
        return future.result()


def _serve(queue: SimpleQueue[_Item | None]) -> None:
    """Do what comes, until None does."""
    while (item := queue.get()) is not None:
        work, future = item
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del item, work, future  # the engine and its sockets would live on in them
