"""Rows of a segment on a stage: checks, the visibility mask (``messages`` defines the rule), selection.

And a session's state: cache, commits, prunes and counters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Int32, Output, Payload, Prune, Segment, unpack_bits
from flowspec_edge.stage.layers.stage_cache import StageCache

Bool = NDArray[np.bool_]


def member(numbers: Int32, within: Int32) -> Bool:
    """Which of ``numbers`` [n] are in ``within``, which increases: bool [n]."""
    if not len(within) or not len(numbers):
        return np.zeros(len(numbers), dtype=bool)
    slots = within.searchsorted(numbers)
    slots[slots == len(within)] = 0
    return within[slots] == numbers


def check(segment: Segment, hidden_size: int, dtype: str, vocabulary: int | None) -> None:
    """Raise ProtocolError unless the segment's fields are consistent and match the stage.

    ``vocabulary``: the number of token ids on the first stage; None on stages that take hidden states.
    """
    n, numbers, bits = len(segment.numbers), segment.numbers, segment.bits
    if numbers.shape != (n,) or segment.positions.shape != (n,):
        raise _segment_error(segment, f"{n} numbers but positions of shape {segment.positions.shape}")
    if bits.ndim != 2 or len(bits) != n or bits.dtype != np.uint8:
        raise _segment_error(segment, f"{n} rows but bits of shape {bits.shape} and type {bits.dtype}")
    if not _increasing(numbers):
        raise _segment_error(segment, "numbers do not increase")
    if not _increasing(segment.committed):
        raise _segment_error(segment, "committed numbers do not increase")
    if len(segment.committed) and segment.committed[-1] >= segment.base:
        raise _segment_error(segment, f"committed number {segment.committed[-1]} is not below base {segment.base}")
    if not n:
        return
    if numbers[0] < segment.first or numbers[-1] >= segment.stop:
        raise _segment_error(segment, f"numbers {numbers[0]} to {numbers[-1]} "
                                      f"leave [{segment.first}, {segment.stop})")
    if segment.positions.min() < 0:
        raise _segment_error(segment, "a position is negative")
    tokens, hidden = segment.tokens, segment.hidden
    if vocabulary is None:
        if hidden is None:
            raise _segment_error(segment, "this stage needs hidden states")
        if hidden.array.shape != (n, hidden_size) or hidden.dtype != dtype:
            raise _segment_error(segment, f"hidden states are {hidden.dtype} {hidden.array.shape}, "
                                          f"expected {dtype} {(n, hidden_size)}")
    elif tokens is None or tokens.shape != (n,):
        raise _segment_error(segment, "the first stage needs one token a row")
    elif tokens.min() < 0 or tokens.max() >= vocabulary:
        raise _segment_error(segment, f"a token id is outside the vocabulary of {vocabulary}")


def select(segment: Segment, keep: Bool) -> Segment:
    return replace(
        segment, numbers=segment.numbers[keep], positions=segment.positions[keep],
        bits=segment.bits[keep],
        tokens=None if segment.tokens is None else segment.tokens[keep],
        hidden=None if segment.hidden is None else select_payload(segment.hidden, keep),
    )


def without_rows(message: Segment | Output) -> Segment | Output:
    none = np.zeros(len(message.numbers), dtype=bool)
    if isinstance(message, Segment):
        return select(message, none)
    return replace(message, numbers=message.numbers[none], hidden=select_payload(message.hidden, none))


def select_payload(payload: Payload, keep: Bool) -> Payload:
    return Payload(payload.dtype, payload.array[keep])


def visible(segment: Segment, cached: Int32) -> tuple[Bool, Bool]:
    """Return what each row sees: (mask [n, m + n] over the cached rows, then the segment's own; orphans [n]).

    ``cached``: [m] int32, increasing, all below the segment's rows; only committed ones below the base.
    An orphan sees a number that was dropped here, so it is dead, too.  ProtocolError if a row does not see
    itself or sees a later one.
    """
    n, m, numbers = len(segment.numbers), len(cached), segment.numbers
    columns = np.concatenate([cached, numbers])
    decided = int(columns.searchsorted(segment.base))
    width = 8 * segment.bits.shape[1]
    bits = unpack_bits(segment.bits, width)
    offsets = columns[decided:] - segment.base
    within = int(offsets.searchsorted(width))
    mask = np.zeros((n, m + n), dtype=bool)
    mask[:, :decided] = True
    mask[:, decided : decided + within] = bits[:, offsets[:within]]
    orphans = np.zeros(n, dtype=bool)
    if np.count_nonzero(bits) != np.count_nonzero(mask[:, decided:]):
        orphans = bits.sum(axis=1) > mask[:, decided:].sum(axis=1)
    if n and numbers[0] < segment.base:  # committed rows: causal among the committed text
        text = numbers < segment.base
        mask[text] &= columns <= numbers[text, None]
        orphans &= ~text
    own_rows = mask[:, m:]
    if not own_rows.diagonal().all():
        raise _segment_error(segment, "a row does not see itself")
    if (own_rows & (numbers > numbers[:, None])).any():
        raise _segment_error(segment, "a row sees a later one")
    return mask, orphans


def _increasing(numbers: NDArray[Any]) -> bool:
    return len(numbers) < 2 or bool((numbers[1:] > numbers[:-1]).all())


def _segment_error(segment: Segment, complaint: str) -> ProtocolError:
    return ProtocolError(f"segment {segment.run} of session {segment.session}: {complaint}")


COUNTERS = (
    "segments",  # computed, empty ones included
    "rows",  # that went through the layers
    "pruned_rows",  # taken out of segments, before or after the layers
    "pruned_cached",  # dropped from the cache: pruned, or not committed
    "experts",  # distinct ones that a segment's rows touched, summed over layers and segments
    "experts_independent",  # the same, expected for rows that choose experts independently
    "orphan_rows",  # whose ancestor had been dropped here
    "cancelled",  # segments that came out empty because of a Cancel
    "dropped_stale",  # messages of another session, an older epoch, or a run seen before
    "dropped_session",  # of the ``dropped_stale`` messages, those whose session is not open
)


def dead(prune: Prune, numbers: Int32) -> NDArray[np.bool_]:
    """Which of ``numbers`` [n] the prune drops: bool [n]."""
    concerned = (numbers >= prune.start) & (numbers < prune.stop)
    return concerned & ~member(numbers, prune.keep)


class PendingPrunes:
    """The prunes that may still apply to rows which have not arrived yet."""

    def __init__(self) -> None:
        self._remembered: dict[int, Prune] = {}  # by sequence, so that a repeated one counts once
        self._arrived = 0  # no row with a smaller number can arrive any more

    def __len__(self) -> int:
        return len(self._remembered)

    def add(self, prune: Prune) -> None:
        if prune.stop > self._arrived:
            self._remembered[prune.sequence] = prune

    def discard_before(self, first: int) -> None:
        """Forget the prunes that cannot apply to rows from number ``first`` on."""
        self._arrived = first
        self._remembered = {s: prune for s, prune in self._remembered.items() if prune.stop > first}

    def dead(self, numbers: Int32) -> NDArray[np.bool_]:
        dropped = np.zeros(len(numbers), dtype=bool)
        for prune in self._remembered.values():
            dropped |= dead(prune, numbers)
        return dropped


@dataclass(eq=False)
class Session:
    """Rows and runs are numbered per session."""

    session: int
    epoch: int
    cache: StageCache
    base: int = 0  # every cached number below it is committed
    run: int | None = None  # the newest admitted
    prunes: PendingPrunes = field(default_factory=PendingPrunes)
    cancelled: set[int] = field(default_factory=set)
    computing: bool = False
    deferred: list[Prune] = field(default_factory=list)  # arrived while computing, for the cache
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def check(self, segment: Segment) -> None:
        """Raise ProtocolError if the segment does not follow the previous one, or names missing rows."""
        name = f"segment {segment.run} of session {segment.session}"
        if segment.run != (0 if self.run is None else self.run + 1):
            after = "first" if self.run is None else f"after segment {self.run}"
            raise ProtocolError(f"{name} came {after}: one is lost")
        if segment.base < self.base:
            raise ProtocolError(f"{name}: base {segment.base} is behind {self.base}")
        if len(segment.numbers) > self.cache.capacity:
            raise ProtocolError(f"{name}: {len(segment.numbers)} rows are more than the session's capacity "
                                f"of {self.cache.capacity}")
        cached = self.cache.numbers
        if len(cached) and len(segment.numbers) and segment.numbers[0] <= cached[-1]:
            raise ProtocolError(f"{name}: number {segment.numbers[0]} is not above {cached[-1]}, held already")
        present = member(segment.committed, cached) | member(segment.committed, segment.numbers)
        if not present.all():
            raise ProtocolError(f"{name}: committed number {segment.committed[~present][0]} is not here")

    def commit(self, segment: Segment) -> None:
        """Apply the segment's commits: every other number below the new base is dead."""
        cached = self.cache.numbers
        self._drop_cached((cached < self.base) | (cached >= segment.base) | member(cached, segment.committed))
        self.base = segment.base
        self.cache.commit(int(self.cache.numbers.searchsorted(self.base)))

    def prune(self, message: Prune) -> None:
        self.prunes.add(message)
        if self.computing:
            self.deferred.append(message)
        else:
            self._drop_cached(~dead(message, self.cache.numbers))

    def apply_deferred(self) -> None:
        deferred, self.deferred = self.deferred, []
        for message in deferred:
            self._drop_cached(~dead(message, self.cache.numbers))

    def _drop_cached(self, keep: NDArray[np.bool_]) -> None:
        self.counters["pruned_cached"] += self.cache.keep(keep)
