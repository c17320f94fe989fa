"""The rows of a segment: whether they are well formed, what they see, and taking some out.

Pure numpy.  Knows the visibility rule of ``messages``.  Does not know caches or models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Int32, Payload, Segment, unpack_bits

Bool = NDArray[np.bool_]


def check(segment: Segment, hidden_size: int, dtype: str, vocabulary: int | None) -> None:
    """ProtocolError unless the segment's fields fit one another and the stage.

    dtype       the wire name that hidden states must have
    vocabulary  the number of token ids on the first stage; None on stages that take hidden states
    """
    n, numbers = len(segment.numbers), segment.numbers
    _require(segment, numbers.shape == (n,) and segment.positions.shape == (n,),
             f"{n} numbers but positions of shape {segment.positions.shape}")
    _require(segment, segment.bits.ndim == 2 and len(segment.bits) == n and segment.bits.dtype == np.uint8,
             f"{n} rows but bits of shape {segment.bits.shape} and type {segment.bits.dtype}")
    _require(segment, _increasing(numbers), "numbers do not increase")
    _require(segment, _increasing(segment.committed), "committed numbers do not increase")
    _require(segment, not len(segment.committed) or segment.committed[-1] < segment.base,
             f"a committed number is not below base {segment.base}")
    if not n:
        return
    _require(segment, segment.first <= numbers[0] and numbers[-1] < segment.stop,
             f"numbers {numbers[0]} to {numbers[-1]} leave [{segment.first}, {segment.stop})")
    _require(segment, segment.positions.min() >= 0, "a position is negative")
    if vocabulary is not None:
        tokens = segment.tokens
        _require(segment, tokens is not None and tokens.shape == (n,), "the first stage needs a token a row")
        assert tokens is not None
        _require(segment, tokens.min() >= 0 and tokens.max() < vocabulary,
                 f"a token id is outside the vocabulary of {vocabulary}")
        return
    hidden = segment.hidden
    _require(segment, hidden is not None, "this stage needs hidden states")
    assert hidden is not None
    _require(segment, hidden.array.shape == (n, hidden_size) and hidden.dtype == dtype,
             f"hidden states are {hidden.dtype} {hidden.array.shape}, expected {dtype} {(n, hidden_size)}")


def take(segment: Segment, keep: Bool) -> Segment:
    """The segment with only the rows where ``keep`` [n] is True; all else as it was."""
    if keep.all():
        return segment
    return replace(
        segment, numbers=segment.numbers[keep], positions=segment.positions[keep],
        bits=segment.bits[keep],
        tokens=None if segment.tokens is None else segment.tokens[keep],
        hidden=None if segment.hidden is None else take_payload(segment.hidden, keep),
    )


def take_payload(payload: Payload, keep: Bool) -> Payload:
    """Only the rows where ``keep`` is True."""
    return Payload(payload.dtype, payload.array[keep])


def visible(segment: Segment, cached: Int32) -> tuple[Bool, Bool]:
    """What each row sees: mask [n, m + n] over the cached rows, then the segment's own.

    cached  [m] int32, increasing, all below the segment's rows; below the base only committed ones

    The second result, [n], is True for orphans: rows that see a number which is not here.  It
    was dropped here, so it is dead and so are they.  ProtocolError if a row does not see itself
    or sees a later one.
    """
    n, m, base = len(segment.numbers), len(cached), segment.base
    columns = np.concatenate([cached, segment.numbers])
    decided = int(np.searchsorted(columns, base))
    width = 8 * segment.bits.shape[1]
    bits = unpack_bits(segment.bits, width)
    offsets = columns[decided:] - base
    within = int(np.searchsorted(offsets, width))
    mask = np.zeros((n, m + n), dtype=bool)
    mask[:, :decided] = True
    mask[:, decided : decided + within] = bits[:, offsets[:within]]
    orphans = mask[:, decided:].sum(axis=1) < bits.sum(axis=1)
    own = segment.numbers[:, None]
    text = segment.numbers < base  # rows that are themselves committed: causal among the text
    if text.any():
        mask[text] &= columns <= own[text]
        orphans &= ~text
    _require(segment, bool(np.diagonal(mask, m).all()), "a row does not see itself")
    _require(segment, not (mask & (columns > own)).any(), "a row sees a later one")
    return mask, orphans


def _increasing(numbers: NDArray[Any]) -> bool:
    return bool((numbers[1:] > numbers[:-1]).all())


def _require(segment: Segment, condition: Any, complaint: str) -> None:
    if not condition:
        raise ProtocolError(f"segment {segment.run} of session {segment.session}: {complaint}")
