"""The state machine of one stage, for any number of sessions.

    admitted = engine.admit(segment)               # None: stale, nothing to do
    [result] = engine.compute([admitted])          # its message: a Segment for the next stage, or an Output

Segments of several sessions may be computed in one pass: the weights are read once for all rows, and each row
attends to its own session's cache.  It knows no sockets, clocks, trees or other stages.  Prune, Cancel, Open
and Close may arrive at any time, also from ``compute``'s ``poll``; a pass does not touch the cache of a
session that has ended meanwhile.

``preparation.warm_up`` comes before the first segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.messages import (
    PROTOCOL_VERSION,
    SAME_RELEASE,
    Cancel,
    Close,
    Open,
    Output,
    Payload,
    Prune,
    Segment,
    Tap,
)
from flowspec_edge.stage import rows
from flowspec_edge.stage.layers.stage_cache import (
    CacheKind,
    LayerArena,
    Part,
    PartResult,
    StageCache,
    StageMemory,
)
from flowspec_edge.stage.rows import COUNTERS, Session

Poll = Callable[[], None]  # called between layers; it may receive messages


class SegmentResult(NamedTuple):
    """What a pass gives for one segment.

    message    for the next stage; an Output from the last one. Without rows if the segment is not wanted
    rows       that went through all layers
    cancelled  nothing of it is wanted any more (:meth:`StageEngine.wants`)
    """

    taps: list[Tap]
    message: Segment | Output
    rows: int = 0
    cancelled: bool = False


class StageModel(Protocol):
    """What computes a stage's rows: a ``shard.Shard``, or one of ``drivers.virtual.recorded``.

    wire        what a message calls the type of its hidden states
    vocabulary  of the tokens that the first stage takes; None on the others
    is_last     whether its results are Outputs
    kinds       how each of its layers remembers rows
    """

    @property
    def hidden_size(self) -> int: ...
    @property
    def wire(self) -> str: ...
    @property
    def vocabulary(self) -> int | None: ...
    @property
    def is_last(self) -> bool: ...
    @property
    def kinds(self) -> Sequence[CacheKind]: ...
    @property
    def layers_of_kinds(self) -> Mapping[CacheKind, Sequence[int]]: ...

    def arena(self, kind: CacheKind, layers: Sequence[int], rows: int) -> LayerArena:
        """Allocate memory for ``rows`` rows of ``layers``."""

    def row_bytes(self, kind: CacheKind) -> int:
        """Return the bytes of one row in one layer."""

    def allocating(self, purpose: str, nbytes: int) -> AbstractContextManager[None]:
        """Raise FlowspecError, in the context, if ``nbytes`` more (0: unknown) do not fit."""

    def run(self, parts: Sequence[Part], keep_going: Callable[[], bool], graphs: Any
            ) -> list[PartResult] | None:
        """Compute the parts, each with rows.

        None as soon as ``keep_going``, which is called between layers, returns False. Writes behind each cache's
        last row; the caller appends them.
        """

    def no_rows(self) -> Payload:
        """Return hidden states [0, H]."""

    def correlation(self, rows: int) -> float | None:
        """Return that of the experts of the last pass, which had ``rows`` (``model.experts``)."""


class StageEngine:
    def __init__(self, model: StageModel, cache_rows: int = 0, requests: int = 0, tentative: int = 0) -> None:
        """Set up an engine without sessions; FlowspecError if the memory does not suffice.

        ``cache_rows``: rows to allocate now (``CacheKind.reserved``); 0 allocates when sessions need it.
        """
        self.model = model
        rows_of = {kind: kind.reserved(cache_rows, requests, tentative) for kind in self.model.layers_of_kinds}
        nbytes = sum(self.model.row_bytes(kind) * rows_of[kind] for kind in self.model.kinds)
        with self._allocating(nbytes, f"KV caches of {cache_rows} rows"):
            self._memory = StageMemory({
                kind: self.model.arena(kind, layers, rows_of[kind])
                for kind, layers in self.model.layers_of_kinds.items()})
        self._sessions: dict[int, Session] = {}  # by number, in the order of their Opens
        self._closed_counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)  # ended sessions, stale messages
        self._retained: dict[int, StageCache] = {}  # rows 0, 1, … that closed sessions left
        self.graphs: dict[int, Any] = {}  # the layers recorded, by number of rows

    @property
    def sessions(self) -> tuple[int, ...]:
        """Oldest first."""
        return tuple(self._sessions)

    @property
    def counters(self) -> dict[str, float]:
        """Sums over all sessions since the last Open that found no other session."""
        counters = [self._closed_counters, *(state.counters for state in self._sessions.values())]
        return {name: sum(counters[name] for counters in counters) for name in COUNTERS}

    def counters_of(self, session: int) -> dict[str, float]:
        state = self._sessions.get(session)
        return dict(state.counters) if state else dict.fromkeys(COUNTERS, 0)

    def cache_of(self, session: int) -> StageCache | None:
        state = self._sessions.get(session)
        return state.cache if state else None

    def cached(self, session: int) -> int:
        """Rows in a session's cache."""
        cache = self.cache_of(session)
        return 0 if cache is None else len(cache)

    @property
    def cache_rows(self) -> int:
        """Rows for which memory is allocated."""
        return self._memory.rows

    @property
    def cache_bytes(self) -> int:
        """Bytes of the memory for all caches, used or not."""
        return self._memory.nbytes

    @property
    def graph_sizes(self) -> int:
        """Numbers of rows for which the layers run as CUDA graphs."""
        return len(self.graphs)

    @property
    def retained(self) -> dict[int, int]:
        """Kept rows by the closed session that left them."""
        return {session: len(cache) for session, cache in self._retained.items()}

    def reset(self) -> None:
        """End all sessions, drop what they left, and set the counters to 0."""
        caches = [*map(self._end, list(self._sessions)), *self._retained.values()]
        self._retained.clear()
        for cache in caches:
            self._memory.give_back(cache)
        self._closed_counters = dict.fromkeys(COUNTERS, 0)

    # -- control messages ------------------------------------------------------------------

    def open(self, message: Open) -> None:
        """Start or restart (higher epoch) a session; drop sessions and kept rows that ``message`` omits.

        ProtocolError for another version or missing kept rows, FlowspecError if the cache does not fit.
        """
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(f"D0 speaks protocol version {message.version}, this stage "
                                f"{PROTOCOL_VERSION}: {SAME_RELEASE}")
        if message.session in self._sessions and message.epoch <= self._sessions[message.session].epoch:
            self._closed_counters["dropped_stale"] += 1
            return
        ended_sessions = [n for n in self._sessions if n == message.session or n not in message.concurrent]
        for number in ended_sessions:
            self._memory.give_back(self._end(number))
        inherited = self._take_retained(message)
        cache = self._cache(message, inherited)
        if message.snapshot:
            try:
                cache.snapshot_at(message.snapshot)
            except ProtocolError:
                self._memory.give_back(cache)
                raise
        if not self._sessions:
            self._closed_counters = dict.fromkeys(COUNTERS, 0)
        base = message.rows if inherited else 0
        self._sessions[message.session] = Session(message.session, message.epoch, cache, base)

    def close(self, message: Close) -> None:
        """End the session; its retained rows stay.

        ProtocolError if a row to retain is missing.
        """
        state = self._sessions.get(message.session)
        if state is None:
            self._count_unknown()
            return
        numbers = np.array(message.retain, dtype=np.int32)
        slots = state.cache.slots(numbers)
        if slots is None:
            raise ProtocolError(f"session {message.session} is to keep {len(numbers)} rows, "
                                f"but not all of them are among the {len(state.cache)} that it has here")
        cache = self._end(message.session)
        if len(slots):
            cache.retain(slots)
            self._retained[message.session] = cache
        else:
            self._memory.give_back(cache)

    def prune(self, message: Prune) -> None:
        """Drop rows that are cached, in the running pass, or still to arrive."""
        state = self._current(message)
        if state is not None:
            state.prune(message)

    def cancel(self, message: Cancel) -> None:
        """Make the results of these runs empty, unless they have already left."""
        state = self._current(message)
        if state is not None:
            state.cancelled.update(message.runs)

    # -- data messages ---------------------------------------------------------------------

    def admit(self, segment: Segment) -> Segment | None:
        """Check ``segment``, apply its commits and remove its dead rows; None if it is stale.

        An admitted segment must be computed before the session's next is admitted.  ProtocolError if the
        segment violates the protocol or contradicts this stage's state.
        """
        state = self._current(segment)
        if state is None:
            return None
        if state.run is not None and segment.run <= state.run:
            state.counters["dropped_stale"] += 1
            return None
        rows.check(segment, self.model.hidden_size, self.model.wire, self.model.vocabulary)
        state.check(segment)
        state.commit(segment)
        state.run = segment.run
        state.cancelled = {run for run in state.cancelled if run >= segment.run}
        state.prunes.discard_before(segment.first)
        dead = state.prunes.dead(segment.numbers)
        dead |= (segment.numbers < segment.base) & ~rows.member(segment.numbers, segment.committed)
        return self._drop_rows(state, segment, dead)

    def compute(self, admitted: Sequence[Segment], poll: Poll | None = None) -> list[SegmentResult]:
        """Run the layers over admitted segments, each of another session, in one pass.

        ``poll`` is called before each layer and while the last layers are pending.  Rows that die meanwhile
        are removed; a cancelled run or an ended session gives an empty result, and if all do, the pass is
        broken off.  FlowspecError if a cache or the memory is full.
        """
        prepared = [self._prepare(segment) for segment in admitted]
        running = [part for part in prepared if part is not None]
        for part in running:
            part.cache.reserve(len(part))
        for part in running:
            self._sessions[part.segment.session].computing = True
        computed = None
        try:
            n, cached = sum(map(len, running)), sum(len(part.cache) for part in running)
            with self.model.allocating(f"computing {n} rows with {cached} in the cache", 0):
                computed = self._run(running, poll)
            for part in running if computed else ():
                if not part.ended:
                    part.cache.append(part.segment.numbers, part.segment.positions)
        finally:
            for part in running:
                if (state := self._state_of(part)) is not None:
                    state.computing = False
                    state.apply_deferred()
        results = iter(computed or ())
        return [self._without_result(segment) if part is None else self._emit(part, next(results, None))
                for segment, part in zip(admitted, prepared, strict=True)]

    def wants(self, segment: Segment) -> bool:
        """Return whether anything of a segment is wanted.

        It is unless its session has ended or begun anew, or its run is cancelled. This alone decides what ends a
        pass early,
        and whose results leave empty.
        """
        state = self._sessions.get(segment.session)
        return state is not None and state.epoch == segment.epoch and segment.run not in state.cancelled

    # -- inside ----------------------------------------------------------------------------

    def _run(self, parts: Sequence[Part], poll: Poll | None) -> list[PartResult] | None:
        def keep_going() -> bool:
            if poll is not None:
                poll()
            for part in parts:
                part.ended = part.ended or self._has_ended(part)
            return not all(part.ended for part in parts)

        return self.model.run(parts, keep_going, self.graphs) if parts else None

    def correlation(self, rows: int) -> float | None:
        """Return the correlation of the experts of the last pass, which had ``rows`` (``model.experts``)."""
        return self.model.correlation(rows)

    def _prepare(self, admitted: Segment) -> Part | None:
        """Remove rows that have died since :meth:`admit`, and orphans.

        None if no row is left, or if the session or the run has ended.
        """
        state = self._sessions.get(admitted.session)
        if state is None or state.epoch != admitted.epoch:
            return None
        state.counters["segments"] += 1
        segment = self._drop_rows(state, admitted, state.prunes.dead(admitted.numbers))
        mask, orphans = rows.visible(segment, state.cache.numbers)
        if orphans.any():
            state.counters["orphan_rows"] += int(orphans.sum())
            segment = rows.select(segment, ~orphans)
            mask, _ = rows.visible(segment, state.cache.numbers)
        part = Part(segment, state.cache, mask, np.concatenate([state.cache.positions, segment.positions]))
        # A part without rows stays out of the pass, which goes on only as long as a part with rows needs it.
        return None if self._has_ended(part) or not len(part) else part

    def _has_ended(self, part: Part) -> bool:
        if self.wants(part.segment):
            return False
        if not part.ended and (state := self._state_of(part)) is not None:
            state.counters["cancelled"] += 1
        return True

    def _state_of(self, part: Part) -> Session | None:
        """Return the part's session; None if it has ended, or began anew."""
        state = self._sessions.get(part.segment.session)
        return state if state is not None and state.epoch == part.segment.epoch else None

    def _emit(self, part: Part, computed: PartResult | None) -> SegmentResult:
        segment, state = part.segment, self._state_of(part)
        if part.ended or computed is None or state is None:
            return self._without_result(segment)
        state.counters["rows"] += len(segment.numbers)
        for name, count in zip(("experts", "experts_independent"), part.experts, strict=True):
            state.counters[name] += count
        taps, hidden = computed
        dead = state.prunes.dead(segment.numbers)
        alive = self._drop_rows(state, segment, dead)
        messages = [
            Tap(segment.session, segment.epoch, segment.run, layer, alive.numbers, _payload(states, dead))
            for layer, states in taps
        ]
        return SegmentResult(messages, self._result(alive, _payload(hidden, dead)), len(segment.numbers))

    def _without_result(self, segment: Segment) -> SegmentResult:
        return SegmentResult([], self._result(segment, None), cancelled=not self.wants(segment))

    def _result(self, segment: Segment, hidden: Payload | None) -> Segment | Output:
        if hidden is None:
            segment = rows.select(segment, np.zeros(len(segment.numbers), dtype=bool))
            hidden = self.model.no_rows()
        if self.model.is_last:
            return Output(segment.session, segment.epoch, segment.run, segment.numbers, hidden)
        return replace(segment, tokens=None, hidden=hidden)

    def _drop_rows(self, state: Session, segment: Segment, dead: rows.Bool) -> Segment:
        if not dead.any():
            return segment
        state.counters["pruned_rows"] += int(dead.sum())
        return rows.select(segment, ~dead)

    def _current(self, message: Prune | Cancel | Segment) -> Session | None:
        """Return the open session of ``message``; None, counted as stale, without one."""
        state = self._sessions.get(message.session)
        if state and state.epoch == message.epoch:
            return state
        self._count_unknown()
        return None

    def _count_unknown(self) -> None:
        for name in ("dropped_stale", "dropped_session"):
            self._closed_counters[name] += 1

    def _end(self, session: int) -> StageCache:
        state = self._sessions.pop(session)
        for name, value in state.counters.items():
            self._closed_counters[name] += value
        return state.cache

    def _take_retained(self, message: Open) -> StageCache | None:
        inherited = self._retained.get(message.parent_session)
        if message.parent_session >= 0 and not 0 < message.rows <= (len(inherited) if inherited else 0):
            raise ProtocolError(f"session {message.session} is to begin with {message.rows} rows of session "
                                f"{message.parent_session}, of which {len(inherited) if inherited else 0} "
                                "are kept here")
        stay = set(message.retained) - {message.parent_session}
        for session in self._retained.keys() - stay - {message.parent_session}:
            self._memory.give_back(self._retained[session])
        self._retained = {session: cache for session, cache in self._retained.items() if session in stay}
        return inherited

    def _cache(self, message: Open, inherited: StageCache | None) -> StageCache:
        """Return an empty cache, or the first rows of ``inherited``, which is given back if that fails."""
        capacity, tentative = message.capacity, message.tentative or message.capacity
        try:
            if capacity < max(message.rows, 1):
                raise ProtocolError(f"a session cannot have a capacity of {capacity} rows")
            with self._allocating(self._memory.missing(capacity, tentative, inherited),
                                  f"a KV cache of {capacity} rows"):
                if inherited is None:
                    return self._memory.take(capacity, tentative)
                inherited.truncate(message.rows)
                self._memory.widen(inherited, capacity, tentative)
                return inherited
        except FlowspecError:
            if inherited is not None:
                self._memory.give_back(inherited)
            raise

    def _allocating(self, nbytes: int, purpose: str) -> AbstractContextManager[None]:
        """Raise FlowspecError, in the context, if ``nbytes`` more do not fit."""
        return self.model.allocating(purpose, nbytes)


def _payload(hidden: Payload, dead: rows.Bool) -> Payload:
    return rows.select_payload(hidden, ~dead) if dead.any() else hidden
