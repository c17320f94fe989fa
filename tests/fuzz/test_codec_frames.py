"""Damaged frames are messages that can be sent again, or protocol errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgpack
import numpy as np
from kits.byte_mutations import amounts, corpus, fuzz

from flowspec_edge import messages as m
from flowspec_edge.errors import ProtocolError
from flowspec_edge.transport.codec import decode, encode

N = np.arange(3, dtype=np.int32)
HIDDEN = m.Payload("float16", np.ones((3, 4), np.float16))
MESSAGES: list[m.Message] = [
    m.Open(1, 2, 40, concurrent=(1, 2), retained=(7,)), m.Close(1, (3, 4)), m.Credit(1, 2, 3),
    m.Segment(1, 0, 0, 0, 3, N, N, 0, np.ones((3, 1), np.uint8), N, tokens=N),
    m.Segment(1, 0, 5, 0, 3, N, N, 0, np.ones((3, 1), np.uint8), N, hidden=HIDDEN, taps=(1, 2)),
    m.Output(1, 0, 2, N, HIDDEN), m.Tap(1, 0, 2, 6, N, HIDDEN), m.Prune(1, 0, 0, 4, 900, N + 5),
    m.Cancel(1, 0, (4, 5)), m.Computed(1, 0, 2, 3, 4, 4, 5, 6, 7), m.Hello("v1", 1, 4, (0, 8), "digest"),
    m.Heartbeat("v1", 1, {"rows": 1.0, "wait_s": float("nan")}), m.SessionReport("v1", 1, 2, {"rows": 3.0}),
    m.Failed("v1", 1, "cause"), m.Shutdown("reason"), m.Refusal(),
]
MESSAGES += [m.Batch((MESSAGES[3], replace(MESSAGES[4], session=2))),  # type: ignore[arg-type, type-var]
             m.Batch((MESSAGES[5], replace(MESSAGES[5], session=2)))]  # type: ignore[arg-type, type-var]
_MANY = b"\xff\xff"  # in place of the header's size: the frames' number and sizes follow


def packed(frames: list[bytes]) -> bytes:
    """Frames as one text of bytes: the header's size first."""
    if len(frames) > 2:
        sizes = b"".join(len(frame).to_bytes(2, "big") for frame in frames)
        return _MANY + len(frames).to_bytes(1, "big") + sizes + b"".join(frames)
    return len(frames[0]).to_bytes(2, "big") + b"".join(frames)


def unpacked(data: bytes) -> list[bytes]:
    if data[:2] == _MANY and len(data) > 2:
        ends = [3 + 2 * data[2]]
        for at in range(3, ends[0], 2):
            ends.append(ends[-1] + int.from_bytes(data[at : at + 2], "big"))
        return [data[start:stop] for start, stop in pairwise(ends)]
    end = 2 + int.from_bytes(data[:2], "big")
    return [data[2:end], data[end:]] if len(data) > end else [data[2:]]


def decoded(data: bytes) -> None:
    message = decode(unpacked(data))
    again = [bytes(frame) for frame in encode(message)]
    assert [bytes(frame) for frame in encode(decode(again))] == again


@amounts
def test_damaged_frames(count: int) -> None:
    seeds = [packed([bytes(frame) for frame in encode(message)]) for message in MESSAGES] + corpus("frames")
    assert fuzz(decoded, seeds, count, ProtocolError) >= len(MESSAGES)


def test_a_header_of_many_small_maps_is_an_error() -> None:
    assert fuzz(lambda data: decode([data]), [msgpack.packb(["Close", "", [], b"", *[{}] * 60_000])], 0,
                ProtocolError) == 0
