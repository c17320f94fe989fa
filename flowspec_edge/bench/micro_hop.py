"""What a hop of a segment costs, beside a bare PUSH/PULL hop of the same bytes.

Two real processes on loopback.  One sends a segment, in turn through ``transport`` and as ready
bytes through bare pyzmq sockets, so that all meet the same noise: as the same frames
(``send_multipart``) and, which nothing with a header can match, as one blob.  The other waits for
it, as a stage waits for work.  A hop lasts from before it is encoded until it has been decoded: the
two processes share the system's monotonic clock.  Before each hop the sender computes for a moment
and the receiver has gone to sleep, as in a pipeline: a hop never finds its peer in full swing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import zmq

from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Payload, Segment
from flowspec_edge.transport.codec import encode
from flowspec_edge.transport.zmq_links import ZmqTransport

_LOOPBACK = "tcp://127.0.0.1:*"
_PATIENCE = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class HopRow:
    """Medians of one kind of segment; times in microseconds, ``size`` in bytes."""

    rows: int
    width: int
    size: int
    blob_us: float
    bare_us: float
    hop_us: float

    @property
    def ratio(self) -> float:
        """Our hop over the bare hop of the same frames."""
        return self.hop_us / self.bare_us


def segment(rows: int, width: int) -> Segment:
    """A segment as V1 sends it to V2: ``rows`` hidden states of ``width`` float16 values."""
    numbers = np.arange(900, 900 + rows, dtype=np.int32)
    hidden = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float16)
    return Segment(session=1, epoch=0, run=7, first=900, stop=900 + rows, numbers=numbers,
                   positions=numbers - 700, base=820, bits=np.full((rows, 12), 255, np.uint8),
                   committed=np.array([817, 819], np.int32), hidden=Payload("float16", hidden))


def measure(rows: int = 16, width: int = 4096, hops: int = 500) -> HopRow:
    """Medians of ``hops`` hops each way of sending, the first tenth left out."""
    message = segment(rows, width)
    frames = [bytes(frame) for frame in encode(message)]
    blob = b"".join(frames)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_receiver, args=(theirs, hops))
    child.start()
    transport = ZmqTransport()
    try:
        link_address, bare_address = ours.recv()
        with zmq.Context() as bare, bare.socket(zmq.PUSH) as bare_out:
            bare_out.connect(bare_address)
            link_out = transport.push(link_address, "hop out")
            ways: list[Callable[[], object]] = [
                lambda: bare_out.send(blob), lambda: bare_out.send_multipart(frames),
                lambda: link_out.send(message, _PATIENCE),
            ]
            starts: list[list[float]] = []
            for _ in range(hops):
                starts.append([])
                for send in ways:
                    _compute()
                    starts[-1].append(time.perf_counter())
                    send()
                    ours.recv_bytes()
            ends = ours.recv()
    finally:
        transport.close()
        child.join()
    times = np.subtract(ends, starts)[hops // 10:]  # [hops, 3] seconds
    blob_us, bare_us, hop_us = (np.median(times, axis=0) * 1e6).tolist()
    return HopRow(rows, width, len(blob), blob_us, bare_us, hop_us)


def _receiver(pipe: Connection, hops: int) -> None:
    """The other process: note when each hop is over, and say so."""
    transport = ZmqTransport()
    with zmq.Context() as bare, bare.socket(zmq.PULL) as bare_in:
        link_in = transport.pull(_LOOPBACK, "hop in")
        bare_in.bind(_LOOPBACK)
        pipe.send((link_in.endpoint, bare_in.last_endpoint))
        ways: list[Callable[[], object]] = [
            bare_in.recv, bare_in.recv_multipart, lambda: link_in.receive(_PATIENCE),
        ]
        ends: list[list[float]] = []
        for _ in range(hops):
            ends.append([])
            for receive in ways:
                if receive() is None:
                    raise FlowspecError("the other process does not send")
                ends[-1].append(time.perf_counter())
                pipe.send_bytes(b".")
        pipe.send(ends)
    transport.close()


def _compute() -> None:
    """Half a millisecond of work."""
    end = time.perf_counter() + 0.5e-3
    while time.perf_counter() < end:
        pass


def table(rows: list[HopRow]) -> str:
    """For people: one line a segment."""
    lines = [f"{'segment':>10}  {'bytes':>8}  {'bare blob':>9}  {'bare hop':>9}  {'our hop':>9}  ratio"]
    for row in rows:
        shape = f"{row.rows}x{row.width}"
        lines.append(f"{shape:>10}  {row.size:>8}  {row.blob_us:>6.0f} us  {row.bare_us:>6.0f} us"
                     f"  {row.hop_us:>6.0f} us  {row.ratio:>5.2f}")
    return "\n".join(lines)


def main() -> None:
    """``python -m flowspec_edge.bench.micro_hop``"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hops", type=int, default=500)
    arguments = parser.parse_args()
    print(table([measure(rows, 4096, arguments.hops) for rows in (1, 16, 64)]))


if __name__ == "__main__":
    main()
