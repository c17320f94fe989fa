"""The messages between devices: small frozen dataclasses with explicit dtypes and shapes.

Numbers.  Every token that enters the pipeline gets the session's next *number*, which never changes and is
never reused.  The committed text is an increasing chain of numbers.  A descendant's number is larger than its
ancestor's, so every number below the *base* (one past the newest committed number) is committed or dead.

Visibility.  A row sees every number committed up to and including its segment's ``committed``, and those
numbers from ``base`` upwards whose bit is set in its row of ``bits``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 9
SAME_RELEASE = "install the same release on all devices, on boards with: flowspec deploy up"  # if versions differ
MAX_BATCH = 64  # sessions in a Batch

Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Hidden states; ``dtype``: "float32", "float16" or "bfloat16" (as uint16 bits in the row-major ``array``)."""

    dtype: str
    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Open:
    """D0 → all: start (or, with a higher epoch, restart) a session; session numbers only rise.

    capacity        cache rows, committed and tentative, that a stage preallocates
    tentative       of these, the most that are uncommitted or in one segment; 0: all
    concurrent      sessions that continue; a stage drops every other, those of a former D0 included
    retained        closed sessions whose retained rows stay; a stage frees the rows of all others
    parent_session  closed session whose first ``rows`` retained rows this one takes over, numbered from 0
                    and committed; the rest is freed; -1: none
    timed           every stage reports how long it computed each segment (Computed)
    snapshot        rows of the text with which a later session may begin, although layers with a window or a
                    state go on: at least ``rows``; 0: none
    """

    session: int
    epoch: int
    capacity: int
    version: int = PROTOCOL_VERSION
    concurrent: tuple[int, ...] = ()
    retained: tuple[int, ...] = ()
    parent_session: int = -1
    rows: int = 0
    timed: bool = False
    tentative: int = 0
    snapshot: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """D0 → all: the session is over.

    Its cache is dropped except committed rows ``retain`` (increasing numbers), which have left the last stage. They
    become rows 0, 1, … for ``Open.parent_session``.
    """

    session: int
    retain: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """D0 → V1 → … → VN: rows to compute; an empty segment is passed on, too.

    run        int     counts the session's segments from 0; Cancel refers to it
    first      int     the number of the first row as D0 sent it; rows dropped on the way leave gaps
    stop       int     one past the last number that D0 had assigned
    numbers    [n]     int32, increasing
    positions  [n]     int32, absolute
    base       int     one past the newest committed number, this segment's commits included
    bits       [n, w]  uint8: bit j (little endian) of row i is set if the row sees number base + j;
                       every row sees itself
    committed  [c]     int32, increasing: numbers committed since the previous segment
    tokens     [n]     int32 ids, on the way to V1; None after
    hidden     [n, H]  hidden states, after V1; None before
    taps       tuple   D0 wants these rows' hidden states after so many layers (0: the embeddings)
    text       bool    all rows are text already: those of the following segments see them all
    """

    session: int
    epoch: int
    run: int
    first: int
    stop: int
    numbers: Int32
    positions: Int32
    base: int
    bits: UInt8
    committed: Int32
    tokens: Int32 | None = None
    hidden: Payload | None = None
    taps: tuple[int, ...] = ()
    text: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """VN → D0: hidden states [n, H] after the final norm, of the rows that arrived."""

    session: int
    epoch: int
    run: int
    numbers: Int32
    hidden: Payload


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments, or outputs, of at least two different sessions, which a stage computes in one pass.

    Each part keeps its session's numbers, commits and visibility; prunes, cancels and losses concern the
    parts of one session.
    """

    parts: tuple[Segment | Output, ...]


def parts_of(message: Segment | Output | Batch) -> tuple[Segment | Output, ...]:
    """Return the parts of a batch, or the message alone."""
    return message.parts if isinstance(message, Batch) else (message,)


def batch_of(parts: Sequence[Segment | Output]) -> Segment | Output | Batch:
    """Return the inverse of :func:`parts_of`."""
    return parts[0] if len(parts) == 1 else Batch(tuple(parts))


def shares(size: int, parts: Sequence[Segment | Output]) -> list[int]:
    """Divide a message's ``size`` bytes among its parts by their rows; the shares add up."""
    weights = list(accumulate((1 + len(part.numbers) for part in parts), initial=0))
    ends = [weight * size // weights[-1] for weight in weights]
    return [end - start for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """Vi → D0: hidden states [n, H] after ``layer`` layers (no final norm), sent before the next stage begins."""

    session: int
    epoch: int
    run: int
    layer: int
    numbers: Int32
    hidden: Payload


@dataclass(frozen=True, slots=True, eq=False)
class Prune:
    """D0 → all, on the control channel: of the numbers in [start, stop) only ``keep`` is still needed.

    A hint: idempotent, and harmless early, late, twice or never.  ``keep`` ([m] int32, increasing) includes
    committed numbers, so the message is right whatever commits a stage has seen.
    """

    session: int
    epoch: int
    sequence: int
    start: int
    stop: int
    keep: Int32


@dataclass(frozen=True, slots=True)
class Cancel:
    """D0 → all: skip these runs wherever they are; each still yields an empty output."""

    session: int
    epoch: int
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """V1 → D0: V1 has computed ``run``, or the batch that begins with it, and has a free slot."""

    session: int
    epoch: int
    run: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Vi → D0, in ``timed`` sessions: computing and sending times, in µs of the stage's monotonic clock.

    rows        of the segment
    batch_rows  of all segments that were computed with it, its own included
    """

    session: int
    epoch: int
    run: int
    stage: int
    rows: int
    batch_rows: int
    start: int
    end: int
    sent: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Vi → D0 on connecting.

    newest  the highest session number that it has received, -1: none
    rows    of a prompt's segment: for more it has no memory, or they gain nothing
    """

    instance: str
    stage: int
    stages: int
    layers: tuple[int, int]
    digest: str
    version: int = PROTOCOL_VERSION
    newest: int = -1
    rows: int = 64


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Vi → D0, regularly; ``isolated``: without a connection to the next device.

    ``counters``: totals since the last Open that found no other session, and the board's readings
    (``system_stats``).
    """

    instance: str
    stage: int
    counters: dict[str, float] = field(default_factory=dict)
    isolated: bool = False


@dataclass(frozen=True, slots=True)
class SessionReport:
    """Vi → D0 when a session has closed: its final counters."""

    instance: str
    stage: int
    session: int
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """Vi → D0: the open sessions cannot continue, because of ``cause``."""

    instance: str
    stage: int
    cause: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """D0 → all: end the process."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """D0 → a stage whose key it admits under another instance id: the stage belongs to another release."""


Message = (
    Open | Close | Segment | Output | Batch | Tap | Prune | Cancel | Credit | Computed | Hello | Heartbeat
    | SessionReport | Failed | Shutdown | Refusal
)


def pack_bits(rows: list[int], width: int) -> UInt8:
    """One Python integer per row to [n, ceil(width / 8)] bytes, bit 0 first."""
    size = (width + 7) // 8
    joined = b"".join(row.to_bytes(size, "little") for row in rows)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(rows), size)


def unpack_bits(bits: UInt8, width: int) -> NDArray[np.bool_]:
    """Return the inverse of :func:`pack_bits`: bool [n, width]; missing bits are False."""
    flat = np.unpackbits(bits, axis=1, bitorder="little", count=width) if bits.size else None
    if flat is None:
        return np.zeros((len(bits), width), dtype=bool)
    return flat.astype(bool)
