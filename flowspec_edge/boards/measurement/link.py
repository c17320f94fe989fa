"""Measures a hop between two processes of this machine, over a cluster's sockets on loopback."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from flowspec_edge.boards.measurement.fit import trimmed_mean
from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Payload, Segment, pack_bits
from flowspec_edge.transport.codec import decode, encode
from flowspec_edge.transport.zmq_links import ZmqLink, ZmqTransport
from flowspec_edge.util.interpreter import guarded_starts
from flowspec_edge.util.tensors import parse_dtype, wire_name

_LOOPBACK = "tcp://127.0.0.1:*"
_TIMEOUT_S = 30.0
_BEGIN_S = 120.0  # for a child to import this package
_ROWS = 16
_LARGE_BYTES = 4_000_000
_MOST_ROWS = 60_000  # the codec's limit
_ASLEEP_S = 0.5e-3  # after which the peer sleeps
_LARGE_EVERY = 8  # every eighth message is large


@dataclass(frozen=True)
class LoopbackHop:
    """A hop of 16 rows to a process that sleeps, as an idle stage does.

    latency_ms  from handing the segment to ZeroMQ until the other process has it
    codec_ms    encoding and decoding
    mbps        10^6 bits a second, from the extra time of larger messages
    """

    latency_ms: float
    codec_ms: float
    mbps: float


def spin(seconds: float) -> None:
    """Keep this process busy, so that its peer falls asleep."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def segment(width: int, dtype: str, rows: int = _ROWS) -> Segment:
    kind = wire_name(parse_dtype(dtype))
    element = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[kind]
    numbers = np.arange(rows, dtype=np.int32)
    return Segment(session=1, epoch=0, run=0, first=0, stop=rows, numbers=numbers, positions=numbers, base=0,
                   bits=pack_bits([1] * rows, 1),
                   committed=numbers[:2], hidden=Payload(kind, np.zeros((rows, width), element)))


def measure_hop(width: int, dtype: str, exchanges: int = 200) -> LoopbackHop:
    """Exchange segments of ``width`` values a row with a child; raise FlowspecError if the child ends."""
    small = segment(width, dtype)
    value = small.hidden.array.itemsize if small.hidden else 1
    large = segment(width, dtype, min(_MOST_ROWS, max(2 * _ROWS, _LARGE_BYTES // (width * value))))
    codec, frames = _codec(small), encode(small)
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=_echo, args=(child_pipe, width, dtype), daemon=True)
    transport = ZmqTransport()
    try:
        back = transport.pull(_LOOPBACK, "echo in")
        with guarded_starts():
            child.start()
        child_pipe.close()  # so that the pipe reports the end of the child
        pipe.send(back.endpoint)
        if not pipe.poll(_BEGIN_S):
            raise FlowspecError("the child process of the loopback measurement does not begin")
        outgoing = transport.push(pipe.recv(), "echo out")
        trips: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(exchanges):
            is_large = turn % _LARGE_EVERY == _LARGE_EVERY - 1
            spin(_ASLEEP_S)
            start = time.perf_counter()
            outgoing.send(large if is_large else small, _TIMEOUT_S)
            _await(transport, back)
            trips[is_large].append(time.perf_counter() - start)
        pipe.send_bytes(b"")
        child.join(_TIMEOUT_S)
    except (EOFError, BrokenPipeError):
        raise FlowspecError("the child process of the loopback measurement has ended") from None
    finally:
        transport.close()
        if child.is_alive():
            child.kill()
            child.join()  # no deadline: SIGKILL ends it
    short, long = (trimmed_mean(trips[kind][len(trips[kind]) // 10:]) for kind in (False, True))
    size = sum(map(len, frames))
    more = sum(map(len, encode(large))) - size
    rate = more * 8 / max(long - short, 1e-6)
    latency = max(short / 2 - codec - size * 8 / rate, 1e-6)
    return LoopbackHop(latency * 1e3, codec * 1e3, rate / 1e6)


def _codec(message: Segment, times: int = 100) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        frames = encode(message)
        middle = time.perf_counter()
        copied = [bytes(frame) for frame in frames]
        decoding = time.perf_counter()
        decode(copied)
        seconds.append(time.perf_counter() - decoding + middle - start)
    return trimmed_mean(seconds)


def _echo(pipe: Connection, width: int, dtype: str) -> None:
    """Answer every message with a small segment until the pipe has data, in a child process."""
    transport = ZmqTransport()
    small = segment(width, dtype)
    incoming = transport.pull(_LOOPBACK, "echo in")
    back = transport.push(pipe.recv(), "echo out")
    pipe.send(incoming.endpoint)
    while not pipe.poll():
        transport.wait([incoming], [], 0.1)
        while incoming.receive() is not None:
            back.send(small, _TIMEOUT_S)
    transport.close()


def _await(transport: ZmqTransport, link: ZmqLink) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while link.receive() is None:
        if time.monotonic() > deadline:
            raise FlowspecError("the child process of the loopback measurement does not answer")
        transport.wait([link], [], 1.0)
