"""The state machine of one stage: messages in, messages out, for any number of sessions.

Knows when a row is stale, dead, orphaned or cancelled, and keeps the cache true to that.  Does
not know sockets, clocks, trees or the other stages; a worker or a simulation drives it:

    admitted = engine.admit(segment)          # None: stale, nothing to do
    taps, result = engine.compute(admitted)   # a Segment for the next stage, or an Output

Prunes, cancels, and Opens and Closes of any session, may come at any moment, also between the layers
of a running ``compute`` (from its ``poll`` callback): a pass whose session is over then ends without
touching the cache again.  Sessions share nothing but the weights; one that is over may leave rows for
one that begins with the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Close,
    Open,
    Output,
    Payload,
    Prune,
    Segment,
    Tap,
)
from flowspec_edge.stage import forward, memory, rows
from flowspec_edge.stage.cache import KVCache
from flowspec_edge.stage.prunes import dead
from flowspec_edge.stage.session import COUNTERS, Session
from flowspec_edge.stage.shard import Shard
from flowspec_edge.stage.staging import Pace, to_host
from flowspec_edge.tensors import from_torch, wire_name
from flowspec_edge.torchdevice import available_bytes

Poll = Callable[[], None]

# On CUDA capacities are multiples of this many rows: sessions of about the same length use the same memory.
_CAPACITY_STEP = 256
_NEED_LESS = "lower the limits of the session, or give this stage fewer layers"


class StageEngine:
    """Runs one shard."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._sessions: dict[int, Session] = {}  # by number, in the order of their Opens
        self._past: dict[str, float] = dict.fromkeys(COUNTERS, 0)  # of no session, or of ended ones
        self._spare: KVCache | None = None  # of a session that was closed and left no rows
        self._kept: dict[int, KVCache] = {}  # rows 0, 1, … that closed sessions left
        self._wire = wire_name(shard.dtype)

    @property
    def sessions(self) -> tuple[int, ...]:
        """The open sessions, the one opened first first."""
        return tuple(self._sessions)

    @property
    def counters(self) -> dict[str, float]:
        """Of all sessions since one was opened that had no other beside it, for Heartbeats."""
        every = [self._past, *(state.counters for state in self._sessions.values())]
        return {name: sum(counters[name] for counters in every) for name in COUNTERS}

    def counters_of(self, session: int) -> dict[str, float]:
        """An open session's own; zeros for one that is not open."""
        state = self._sessions.get(session)
        return dict(state.counters) if state else dict.fromkeys(COUNTERS, 0)

    @property
    def cache(self) -> KVCache | None:
        """The cache of the session opened last."""
        return next(reversed(self._sessions.values())).cache if self._sessions else None

    def cache_of(self, session: int) -> KVCache | None:
        """An open session's cache."""
        state = self._sessions.get(session)
        return state.cache if state else None

    def cached(self, session: int) -> int:
        """Rows in a session's cache."""
        state = self._sessions.get(session)
        return len(state.cache) if state else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches: of open sessions, of kept rows, and what lies ready for the next Open."""
        caches = [*(state.cache for state in self._sessions.values()), *self._kept.values()]
        return sum(cache.nbytes for cache in caches) + (self._spare.nbytes if self._spare else 0)

    @property
    def kept(self) -> dict[int, int]:
        """Rows that are kept, by the closed session that left them."""
        return {session: len(cache) for session, cache in self._kept.items()}

    # -- control messages ------------------------------------------------------------------

    def open(self, message: Open) -> None:
        """Start a session, or restart it with a higher epoch; every other that the message does not
        name is given up, and so are kept rows.

        ProtocolError for another protocol version or for kept rows that are not here, FlowspecError if
        the cache does not fit.
        """
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(f"D0 speaks protocol version {message.version}, this stage "
                                f"{PROTOCOL_VERSION}: install the same release on all devices")
        if message.session in self._sessions and message.epoch <= self._sessions[message.session].epoch:
            self._past["dropped_stale"] += 1
            return
        ended = [n for n in self._sessions if n == message.session or n not in message.beside]
        caches = [self._end(number) for number in ended]
        begun = self._take_kept(message)
        cache = self._cache(message.capacity, caches, begun, message.rows)
        if not self._sessions:
            self._past = dict.fromkeys(COUNTERS, 0)
        base = message.rows if begun else 0
        self._sessions[message.session] = Session(message.session, message.epoch, cache, base)

    def close(self, message: Close) -> None:
        """End the session and give back the memory of all rows but those to be kept.

        If none are, the memory stays for the next Open, which uses or frees it.  ProtocolError if a row
        that is to be kept is not here.
        """
        state = self._sessions.get(message.session)
        if state is None:
            self._past["dropped_stale"] += 1
            return
        kept = np.array(message.kept, dtype=np.int32)
        slots = state.cache.slots(kept)
        if slots is None:
            raise ProtocolError(f"session {message.session} is to keep {len(kept)} rows, "
                                f"but not all of them are among the {len(state.cache)} that it has here")
        cache = self._end(message.session)
        if len(slots):
            cache.move(len(slots), slots)
            self._kept[message.session] = cache
        else:
            self._spare = cache

    def prune(self, message: Prune) -> None:
        """Give up the rows that ``message`` no longer wants: held, running, or yet to come."""
        state = self._current(message)
        if state is None:
            return
        state.prunes.add(message)
        if state.computing:
            state.deferred.append(message)
        else:
            self._drop_cached(state, ~dead(message, state.cache.numbers))

    def cancel(self, message: Cancel) -> None:
        """Let these runs come out empty, if they have not come out yet."""
        state = self._current(message)
        if state is not None:
            state.cancelled.update(message.runs)

    # -- data messages ---------------------------------------------------------------------

    def admit(self, segment: Segment) -> Segment | None:
        """Check ``segment``, apply its commits and take out the rows that are dead by now.

        None if it is stale.  What is admitted must be computed before the next is admitted.
        ProtocolError if it contradicts the protocol or what this stage holds.
        """
        state = self._current(segment)
        if state is None:
            return None
        if state.run is not None and segment.run <= state.run:
            state.counters["dropped_stale"] += 1
            return None
        self._check(state, segment)
        self._commit(state, segment)
        state.run = segment.run
        state.cancelled = {run for run in state.cancelled if run >= segment.run}
        state.prunes.arrived(segment.first)
        gone = state.prunes.dead(segment.numbers)
        gone |= (segment.numbers < segment.base) & ~rows.member(segment.numbers, segment.committed)
        return self._without(state, segment, gone)

    @torch.inference_mode()
    def compute(self, admitted: Segment, poll: Poll | None = None) -> tuple[list[Tap], Segment | Output]:
        """Run the layers over an admitted segment; ``poll`` is called before each layer, on CUDA when the
        device is near it, and again while the last layers are waited for.

        Returns the taps asked for of this stage's layers, and the Segment for the next stage or,
        from the last one, the Output.  Rows that died meanwhile are taken out; a run that was
        cancelled, or whose session is gone, comes out empty.  FlowspecError if the cache is full, or the
        memory.
        """
        state = self._sessions.get(admitted.session)
        if state is None or state.epoch != admitted.epoch:
            return [], self._result(admitted, None)
        state.counters["segments"] += 1
        segment = self._without(state, admitted, state.prunes.dead(admitted.numbers))
        mask, orphans = rows.visible(segment, state.cache.numbers)
        if orphans.any():
            state.counters["orphan_rows"] += int(orphans.sum())
            segment = rows.take(segment, ~orphans)
            mask, _ = rows.visible(segment, state.cache.numbers)
        state.cache.reserve(len(segment.numbers))
        state.computing = True
        try:
            task = f"computing {len(segment.numbers)} rows with {len(state.cache)} in the cache"
            with memory.claim(task, 0, _NEED_LESS):
                taps, hidden = self._run(state, segment, mask, poll)
            if hidden is not None:
                state.cache.append(segment.numbers)
        finally:
            state.computing = False
            self._settle(state)
        if hidden is None:
            return [], self._result(segment, None)
        state.counters["rows"] += len(segment.numbers)
        return self._emit(state, segment, taps, hidden)

    # -- inside ----------------------------------------------------------------------------

    def _run(self, state: Session, segment: Segment, mask: rows.Bool, poll: Poll | None
             ) -> tuple[list[tuple[int, Tensor]], Tensor | None]:
        """Taps (layers passed, hidden states) and what leaves the shard, in the CPU's memory; None if it was
        given up."""
        if self._given_up(state, segment):
            return [], None
        if not len(segment.numbers):
            return [], torch.empty(0, self.shard.hidden_size, dtype=self.shard.dtype)
        first, last = self.shard.layers
        taps: list[tuple[int, Tensor]] = []

        def tap(layer: int, inputs: Tensor) -> None:
            # What comes in was tapped where it was computed; only the embeddings are made here.
            if layer in segment.taps and (layer > first or self.shard.embed is not None):
                taps.append((layer, inputs))

        def go_on() -> bool:
            if poll is not None:
                poll()
            return not self._given_up(state, segment)

        pace = Pace.of(self.shard.device)
        hidden = forward.layers(self.shard, state.cache, forward.inputs(self.shard, segment),
                                segment.positions, mask, tap, go_on, pace)
        if hidden is None:
            return [], None
        # A stage without layers has made nothing but, if it is the first, the embeddings.
        if last in segment.taps and (last > first or self.shard.embed is not None):
            taps.append((last, hidden))
        hidden, *tapped = to_host([forward.outputs(self.shard, hidden), *(states for _, states in taps)])
        pace.enqueued()
        if not pace.finish(go_on):
            return [], None
        return [(layer, states) for (layer, _), states in zip(taps, tapped, strict=True)], hidden

    def _given_up(self, state: Session, segment: Segment) -> bool:
        if not self._is_open(state):
            return True
        if segment.run in state.cancelled:
            state.counters["cancelled"] += 1
            return True
        return False

    def _settle(self, state: Session) -> None:
        """Apply the prunes that came while the cache was in use."""
        deferred, state.deferred = state.deferred, []
        if self._is_open(state):
            for message in deferred:
                self._drop_cached(state, ~dead(message, state.cache.numbers))

    def _emit(self, state: Session, segment: Segment, taps: list[tuple[int, Tensor]],
              hidden: Tensor) -> tuple[list[Tap], Segment | Output]:
        gone = state.prunes.dead(segment.numbers)
        alive = self._without(state, segment, gone)
        messages = [
            Tap(segment.session, segment.epoch, segment.run, layer, alive.numbers, _payload(states, gone))
            for layer, states in taps
        ]
        return messages, self._result(alive, _payload(hidden, gone))

    def _result(self, segment: Segment, hidden: Payload | None) -> Segment | Output:
        """The message that leaves the stage; without ``hidden`` it has no rows."""
        if hidden is None:
            segment = rows.take(segment, np.zeros(len(segment.numbers), dtype=bool))
            hidden = from_torch(torch.empty(0, self.shard.hidden_size, dtype=self.shard.dtype))
        if self.shard.norm is not None:
            return Output(segment.session, segment.epoch, segment.run, segment.numbers, hidden)
        return replace(segment, tokens=None, hidden=hidden)

    def _without(self, state: Session, segment: Segment, gone: rows.Bool) -> Segment:
        if not gone.any():
            return segment
        state.counters["pruned_rows"] += int(gone.sum())
        return rows.take(segment, ~gone)

    def _current(self, message: Prune | Cancel | Segment) -> Session | None:
        """The open session that ``message`` belongs to; otherwise counts it as stale."""
        state = self._sessions.get(message.session)
        if state and state.epoch == message.epoch:
            return state
        self._past["dropped_stale"] += 1
        return None

    def _is_open(self, state: Session) -> bool:
        """Whether ``state`` has been neither closed nor given up, nor opened again."""
        return self._sessions.get(state.session) is state

    def _end(self, session: int) -> KVCache:
        """Forget a session but for its counters; its cache, which nothing uses any more."""
        state = self._sessions.pop(session)
        for name, value in state.counters.items():
            self._past[name] += value
        return state.cache

    def _check(self, state: Session, segment: Segment) -> None:
        vocabulary = None if self.shard.embed is None else int(self.shard.config.vocab_size)
        rows.check(segment, self.shard.hidden_size, self._wire, vocabulary)
        name = f"segment {segment.run} of session {segment.session}"
        if state.run is not None and segment.run != state.run + 1:
            raise ProtocolError(f"{name} came after segment {state.run}: one is lost")
        if segment.base < state.base:
            raise ProtocolError(f"{name}: base {segment.base} is behind {state.base}")
        held = state.cache.numbers
        if len(held) and len(segment.numbers) and segment.numbers[0] <= held[-1]:
            raise ProtocolError(f"{name}: number {segment.numbers[0]} is not above {held[-1]}, held already")
        known = rows.member(segment.committed, held) | rows.member(segment.committed, segment.numbers)
        if not known.all():
            raise ProtocolError(f"{name}: committed number {segment.committed[~known][0]} is not here")

    def _commit(self, state: Session, segment: Segment) -> None:
        """Everything below the new base that was not committed is dead."""
        held = state.cache.numbers
        keep = (held < state.base) | (held >= segment.base) | rows.member(held, segment.committed)
        self._drop_cached(state, keep)
        state.base = segment.base

    def _drop_cached(self, state: Session, keep: rows.Bool) -> None:
        state.counters["pruned_cached"] += state.cache.keep(keep)

    def _take_kept(self, message: Open) -> KVCache | None:
        """The kept rows that a session begins with; all that ``message`` does not hold are given up."""
        begun = self._kept.get(message.after)
        if message.after >= 0 and not 0 < message.rows <= (len(begun) if begun else 0):
            raise ProtocolError(f"session {message.session} is to begin with {message.rows} rows of session "
                                f"{message.after}, of which {len(begun) if begun else 0} are kept here")
        stay = set(message.held) - {message.after}
        self._kept = {session: cache for session, cache in self._kept.items() if session in stay}
        return begun

    def _cache(self, capacity: int, ended: list[KVCache], begun: KVCache | None, rows: int) -> KVCache:
        """A cache with the first ``rows`` of ``begun``, or an empty one: the memory of one that has ended
        where the size is the same, and no other of those is kept."""
        if capacity < max(rows, 1):
            raise ProtocolError(f"a session cannot have a capacity of {capacity} rows")
        if self._spare is not None:
            ended.append(self._spare)
            self._spare = None
        shard = self.shard
        if shard.device.type == "cuda":
            capacity = -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP
        for cache in ended if begun is None else ():
            if cache.capacity == capacity:
                cache.clear()
                return cache
        ended.clear()  # before more is asked for
        memory.release(shard.device)
        lo, hi = shard.layers
        nbytes = (hi - lo) * 2 * capacity * shard.kv_heads * shard.head_dim * shard.dtype.itemsize
        available = available_bytes(shard.device)
        with memory.claim(f"a KV cache of {capacity} rows", nbytes, _NEED_LESS, available):
            if begun is not None:
                begun.move(capacity, np.arange(rows))
                return begun
            return KVCache(shard.layers, shard.kv_heads, shard.head_dim, capacity, shard.dtype, shard.device)


def _payload(hidden: Tensor, gone: rows.Bool) -> Payload:
    payload = from_torch(hidden)
    return rows.take_payload(payload, ~gone) if gone.any() else payload
