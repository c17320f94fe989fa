"""What travels between devices: small frozen dataclasses with explicit dtypes and shapes.

Knows the fields of every message and the rule of what a row may see.  Does not know how a message
is encoded (``transport``), who sends it when (``runtime``), or why (``strategies``).

Numbers.  Every token that enters the pipeline gets the session's next free *number*, once; the
numbers never change and are never reused.  The committed text is an increasing chain of numbers.
A descendant's number is always larger than its ancestor's, so everything below the *base* (one
past the newest committed number) is decided: committed, or dead.

Visibility.  A row of a segment sees every number committed up to and including that segment's
``committed``, and those numbers from ``base`` upwards whose bit is set in its row of ``bits``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 3

Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A dense tensor on the wire: row-major ``array`` and the element type it stands for.

    ``dtype`` is "float32", "float16" or "bfloat16"; bfloat16 has no numpy type, so its bits are
    held in a uint16 array.
    """

    dtype: str
    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Open:
    """D0 → all: start (or restart, with a higher epoch) a session of at most ``capacity`` rows.

    ``capacity`` counts cache rows, committed and tentative; a stage preallocates them.
    ``beside`` are the sessions that go on beside this one; a stage gives up every other, so that a
    new D0 leaves nothing of a former one behind.  Sessions are opened in the order of their numbers.

    held   closed sessions whose kept rows stay; the rows of all others are given up
    after  a closed session, one of which rows were kept: this one begins with the first ``rows`` of
           them, numbered from 0 and committed, and nothing stays of that one; -1: it begins empty
    timed  every stage tells how long each segment took it (Computed)
    """

    session: int
    epoch: int
    capacity: int
    version: int = PROTOCOL_VERSION
    beside: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    after: int = -1
    rows: int = 0
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """D0 → all: the session is over; its cache is dropped but for the rows ``kept``.

    ``kept`` are numbers, increasing, of committed rows that have come out of the last stage; every
    stage keeps them, as rows 0, 1, …, for a session that begins with the same text (Open.after).
    """

    session: int
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """D0 → V1 → … → VN: rows to compute; zero rows are allowed and are passed on.

    run        int     counts the segments of a session from 0; names what a Cancel cancels
    first      int     the number D0 gave to the first row; rows dropped on the way leave gaps
    stop       int     one past the last number D0 had given out when it sent this segment
    numbers    [n]     int32, increasing
    positions  [n]     int32, absolute positions in the text
    base       int     one past the newest committed number, this segment's commits included
    bits       [n, w]  uint8: bit j (little endian, bit 0 first) of row i: sees number base + j;
                       every row sees itself
    committed  [c]     int32, increasing: numbers committed since the segment before this one
    tokens     [n]     int32 ids, on the way to V1; None after
    hidden     [n, H]  hidden states, after V1; None before
    taps       tuple   D0 wants these rows' hidden states after so many layers (0: the embeddings)
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


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """VN → D0: hidden states after the final norm, [n, H], for the rows that arrived."""

    session: int
    epoch: int
    run: int
    numbers: Int32
    hidden: Payload


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """Vi → D0: the rows' hidden states after ``layer`` layers, before any final norm: [n, H].

    Sent by the stage that computed them, so it is there before the next stage's work begins.
    """

    session: int
    epoch: int
    run: int
    layer: int
    numbers: Int32
    hidden: Payload


@dataclass(frozen=True, slots=True, eq=False)
class Prune:
    """D0 → all, own channel: of the numbers in [start, stop) only ``keep`` is still wanted.

    A hint to stop wasting work: idempotent, right early, late, twice or never.  Numbers outside
    the range are untouched.  ``keep`` ([m] int32, increasing) includes committed numbers, so the
    message is right whatever a stage has learned of commits so far.
    """

    session: int
    epoch: int
    sequence: int
    start: int
    stop: int
    keep: Int32


@dataclass(frozen=True, slots=True)
class Cancel:
    """D0 → all: skip these runs where they are; an empty output still comes out for each."""

    session: int
    epoch: int
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """V1 → D0: V1 has finished computing ``run`` and has a free slot."""

    session: int
    epoch: int
    run: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Vi → D0, in sessions that are ``timed``: when the stage computed ``rows`` rows of ``run``.

    ``start``, ``end`` and ``sent`` (when this message left) are in microseconds of the stage's own
    monotonic clock.
    """

    session: int
    epoch: int
    run: int
    stage: int
    rows: int
    start: int
    end: int
    sent: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Vi → D0 on connecting: who I am and what I hold."""

    instance: str
    stage: int
    stages: int
    layers: tuple[int, int]
    digest: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Vi → D0, regularly: I live, and this is how I am and what I did.

    counters  with ``closed``, the number of a session that ended: what that one alone took.  Otherwise
              what was done since the session ``since`` began, the last that had no other beside it; how
              the board is (``runtime.vitals``); ``apart_s``, while Vi's next device is out of reach:
              since how many seconds
    """

    instance: str
    stage: int
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """Vi → D0: I cannot go on, because of ``cause``."""

    instance: str
    stage: int
    cause: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """D0 → all: end the process."""

    reason: str = ""


Message = (
    Open | Close | Segment | Output | Tap | Prune | Cancel | Credit | Computed | Hello | Heartbeat
    | Failed | Shutdown
)


def pack_bits(rows: list[int], width: int) -> UInt8:
    """Pack one Python integer a row into [n, ceil(width / 8)] bytes, bit 0 first."""
    size = (width + 7) // 8
    joined = b"".join(row.to_bytes(size, "little") for row in rows)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(rows), size)


def unpack_bits(bits: UInt8, width: int) -> NDArray[np.bool_]:
    """The inverse of :func:`pack_bits`: bool [n, width]; bits past the packed ones are False."""
    flat = np.unpackbits(bits, axis=1, bitorder="little", count=width) if bits.size else None
    if flat is None:
        return np.zeros((len(bits), width), dtype=bool)
    return flat.astype(bool)
