"""Checks, visibility mask and selection of a segment's rows; ``messages`` defines the visibility rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Int32, Output, Payload, Segment, unpack_bits

Bool = NDArray[np.bool_]


def member(numbers: Int32, within: Int32) -> Bool:
    """Which of ``numbers`` [n] are in ``within``, which increases: bool [n]."""
    if not len(within) or not len(numbers):
        return np.zeros(len(numbers), dtype=bool)
    slots = within.searchsorted(numbers)
    slots[slots == len(within)] = 0
    return within[slots] == numbers


def check(segment: Segment, hidden_size: int, dtype: str, vocabulary: int | None) -> None:
    """ProtocolError unless the segment's fields are consistent and match the stage.

    ``vocabulary``: the number of token ids on the first stage; None on stages that take hidden states.
    """
    n, numbers, bits = len(segment.numbers), segment.numbers, segment.bits
    if numbers.shape != (n,) or segment.positions.shape != (n,):
        raise _wrong(segment, f"{n} numbers but positions of shape {segment.positions.shape}")
    if bits.ndim != 2 or len(bits) != n or bits.dtype != np.uint8:
        raise _wrong(segment, f"{n} rows but bits of shape {bits.shape} and type {bits.dtype}")
    if not _increasing(numbers):
        raise _wrong(segment, "numbers do not increase")
    if not _increasing(segment.committed):
        raise _wrong(segment, "committed numbers do not increase")
    if len(segment.committed) and segment.committed[-1] >= segment.base:
        raise _wrong(segment, f"committed number {segment.committed[-1]} is not below base {segment.base}")
    if not n:
        return
    if numbers[0] < segment.first or numbers[-1] >= segment.stop:
        raise _wrong(segment, f"numbers {numbers[0]} to {numbers[-1]} "
                              f"leave [{segment.first}, {segment.stop})")
    if segment.positions.min() < 0:
        raise _wrong(segment, "a position is negative")
    tokens, hidden = segment.tokens, segment.hidden
    if vocabulary is None:
        if hidden is None:
            raise _wrong(segment, "this stage needs hidden states")
        if hidden.array.shape != (n, hidden_size) or hidden.dtype != dtype:
            raise _wrong(segment, f"hidden states are {hidden.dtype} {hidden.array.shape}, "
                                  f"expected {dtype} {(n, hidden_size)}")
    elif tokens is None or tokens.shape != (n,):
        raise _wrong(segment, "the first stage needs one token a row")
    elif tokens.min() < 0 or tokens.max() >= vocabulary:
        raise _wrong(segment, f"a token id is outside the vocabulary of {vocabulary}")


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
    """What each row sees: (mask [n, m + n] over the cached rows, then the segment's own; orphans [n]).

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
    own = mask[:, m:]
    if not own.diagonal().all():
        raise _wrong(segment, "a row does not see itself")
    if (own & (numbers > numbers[:, None])).any():
        raise _wrong(segment, "a row sees a later one")
    return mask, orphans


def _increasing(numbers: NDArray[Any]) -> bool:
    return len(numbers) < 2 or bool((numbers[1:] > numbers[:-1]).all())


def _wrong(segment: Segment, complaint: str) -> ProtocolError:
    return ProtocolError(f"segment {segment.run} of session {segment.session}: {complaint}")
