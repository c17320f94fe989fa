"""For the tests of hostile peers: frames that no honest device sends, and sockets with or without a key.

What is forged can always be told from the real thing: a device whose key was stolen can also send plausible
wrong hidden states, without any sign of it.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import msgpack
import numpy as np
import zmq

from flowspec_edge import messages as m
from flowspec_edge.transport.codec import encode
from flowspec_edge.transport.keys import KeyPair

HTTP = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n{}\r\n"
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"
NULL = b"NULL".ljust(20, b"\0") + b"\0" * 32
# What has once ended a cluster or a worker, or cost seconds and memory.
CORPUS: list[list[bytes]] = [
    [HTTP],
    [b""],
    [b"\x93\x01"],
    [b"\x80" * 1000],
    [b"\x91" * 5000],
    [b"\xdc\x00\x3b" + (b"\xdd\x00\x01\x00\x00" + b"\x80" * 65536) * 3],
    [b"\xdd\x00\x01\x00\x00" * 500],
    [msgpack.packb(["Credit", "", [], b"", 1, 0, 2**64 - 1])],
    [msgpack.packb(["Segment", "int32", [65536], b"", 1])],
    [b"x"] * 9,
]
RAW = [HTTP, b"\x03\x00ab\x03\x00cd", bytes(range(1, 200)), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
       GREETING[:10], GREETING + NULL[:5], GREETING + NULL, GREETING + NULL + b"\x04\x19\x05READY",
       b"\xff" * 400,
       GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32 + b"\x04\xc8\x05HELLO\x01\x00" + b"\0" * 193]


def forged(rng: random.Random, session: int, stage: int, instance: str) -> m.Message:
    """A well-formed message of any type, on ``session`` or another, that no honest device sends."""
    on = rng.choice([session, session, session, 0, max(0, session - 1)])
    epoch = rng.choice([0, 0, 0, 1, 2**40])
    rows, first = rng.choice([0, 1, 3]), rng.choice([10**6, 2**31 - 4])
    numbers = np.arange(first, first + rows, dtype=np.int32)
    hidden = m.Payload("float32", np.ones((rows, 3), np.float32))
    ids = (on, epoch, rng.choice([10**6, 2**62]))
    position = rng.choice([-1, 0, 2**31 - 1])
    some: list[m.Message] = [
        m.Open(on, epoch, rng.choice([1, 2**62]), parent_session=rng.choice([-1, on]), rows=1),
        m.Close(on, rng.choice([(), (1, 2), (2**62,)])),
        m.Segment(*ids, first, 2**31, numbers, np.full(rows, position, np.int32), rng.choice([0, 2**31]),
                  np.full((rows, 2), 255, np.uint8), numbers, hidden=hidden),
        m.Segment(*ids, 0, 0, numbers, numbers, 0, np.zeros((rows, 0), np.uint8), numbers[:0],
                  tokens=numbers),
        m.Output(*ids, numbers, hidden), m.Output(on, epoch, 0, numbers, hidden),
        m.Tap(*ids, 0, numbers, hidden),
        m.Prune(on, epoch, 2**62, 0, 2**31 - 1, numbers), m.Cancel(on, epoch, (2**62,)),
        m.Credit(*ids), m.Computed(*ids, rng.choice([stage, stage + 7]), 4, 4, 0, 2**62, 0),
        m.Hello(instance, stage + 1, 2, (0, 1), "digest"),
        m.Hello(instance, stage, 2, (0, 1), "digest", newest=2**63 - 1),
        m.Heartbeat(instance, stage + 1, {"rows": 1e308}),
        m.Heartbeat(instance, stage, {"rows": float("nan"), "resident": float("inf")}),
        m.SessionReport(instance, stage, on + 5, {"bytes_out": float("inf"), "slot_s": float("nan")}),
        m.Failed(instance, stage, "forged\x1b[31m"), m.Shutdown("forged"),
    ]
    data = [message for message in some if isinstance(message, m.Segment | m.Output)]
    pair = rng.choice([(data[0], data[1]), (data[2], data[3])])
    some.append(m.Batch((pair[0], replace(pair[1], session=on + 1))))
    return rng.choice(some)


def wrong_frames(rng: random.Random, session: int, stage: int, instance: str) -> list[bytes]:
    """Frames of one message: random, from the corpus, forged, or forged and mutated."""
    kind = rng.random()
    if kind < 0.1:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 5))]
    if kind < 0.2:
        return rng.choice(CORPUS)
    frames = [bytes(frame) for frame in encode(forged(rng, session, stage, instance))]
    if kind < 0.6:
        return frames
    which = rng.randrange(len(frames))
    frame = bytearray(frames[which])
    if frame:
        at = rng.randrange(len(frame))
        match rng.randrange(3):
            case 0:
                frame[at] ^= 1 << rng.randrange(8)
            case 1:
                del frame[at:]
            case _:
                frame[at:at] = rng.randbytes(3)
    frames[which] = bytes(frame)
    return frames


@contextmanager
def intruder(kind: int, endpoint: str, identity: str = "", own: KeyPair | None = None,
             server: bytes = b"") -> Iterator[Callable[[Sequence[bytes]], None]]:
    """A PUSH or DEALER socket with the key ``own``, or with none; gives a function that sends."""
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        made.sndtimeo = 20_000
        if identity:
            made.routing_id = identity.encode()
        if own:
            made.curve_serverkey, made.curve_secretkey, made.curve_publickey = server, own.secret, own.public
        made.connect(endpoint)
        yield lambda frames: made.send_multipart(list(frames))


def knock(endpoints: Sequence[str], held: list[socket.socket]) -> None:
    """Every kind of raw bytes to every port; half of the connections stay open, in ``held``."""
    for endpoint in endpoints:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        for place, data in enumerate(RAW):
            raw = socket.create_connection((host, int(port)))
            with suppress(OSError):
                raw.sendall(data)
            if place % 2:
                raw.close()
            else:
                held.append(raw)
