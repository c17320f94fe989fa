"""What a hop of a segment costs, beside a bare PUSH/PULL hop of the same bytes.

Two real processes throw a segment to and fro over loopback, in turn as a message through
``transport`` (encoded, sent, received, decoded) and as one blob through bare pyzmq sockets, so
that both meet the same noise.  A hop is half a round trip.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import zmq

from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Message, Payload, Segment
from flowspec_edge.transport.base import Link
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
    bare_us: float
    hop_us: float

    @property
    def ratio(self) -> float:
        return self.hop_us / self.bare_us


def segment(rows: int, width: int) -> Segment:
    """A segment as V1 sends it to V2: ``rows`` hidden states of ``width`` float16 values."""
    numbers = np.arange(900, 900 + rows, dtype=np.int32)
    hidden = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float16)
    return Segment(session=1, epoch=0, run=7, first=900, stop=900 + rows, numbers=numbers,
                   positions=numbers - 700, base=820, bits=np.full((rows, 12), 255, np.uint8),
                   committed=np.array([817, 819], np.int32), hidden=Payload("float16", hidden))


def measure(rows: int = 16, width: int = 4096, rounds: int = 1000) -> HopRow:
    """Medians of ``rounds`` round trips each, the first tenth left out."""
    message = segment(rows, width)
    blob = b"".join(encode(message))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_echo, args=(theirs, rounds))
    child.start()
    transport = ZmqTransport()
    try:
        with zmq.Context() as bare:
            link_in, bare_in = transport.pull(_LOOPBACK, "hop in"), bare.socket(zmq.PULL)
            bare_in.bind(_LOOPBACK)
            ours.send((link_in.endpoint, bare_in.last_endpoint))
            link_address, bare_address = ours.recv()
            link_out, bare_out = transport.push(link_address, "hop out"), bare.socket(zmq.PUSH)
            bare_out.connect(bare_address)
            times: dict[str, list[float]] = {"bare": [], "hop": []}
            for _ in range(rounds):
                start = time.perf_counter()
                bare_out.send(blob)
                bare_in.recv()
                middle = time.perf_counter()
                _pass_on(link_out, message)
                _next(link_in)
                times["bare"].append(middle - start)
                times["hop"].append(time.perf_counter() - middle)
            bare_in.close()
            bare_out.close()
    finally:
        transport.close()
        child.join()
    warm = rounds // 10
    bare_us, hop_us = (median(times[kind][warm:]) / 2 * 1e6 for kind in ("bare", "hop"))
    return HopRow(rows, width, len(blob), bare_us, hop_us)


def _echo(pipe: multiprocessing.connection.Connection, rounds: int) -> None:
    """The other process: send everything back."""
    transport = ZmqTransport()
    with zmq.Context() as bare:
        link_in, bare_in = transport.pull(_LOOPBACK, "echo in"), bare.socket(zmq.PULL)
        bare_in.bind(_LOOPBACK)
        link_address, bare_address = pipe.recv()
        link_out, bare_out = transport.push(link_address, "echo out"), bare.socket(zmq.PUSH)
        bare_out.connect(bare_address)
        pipe.send((link_in.endpoint, bare_in.last_endpoint))
        for _ in range(rounds):
            bare_out.send(bare_in.recv())
            _pass_on(link_out, _next(link_in))
        bare_in.close()
        bare_out.close()
    transport.close()


def _pass_on(link: Link, message: Message) -> None:
    if not link.send(message, _PATIENCE):
        raise FlowspecError(f"{link.name}: the other process takes no messages")


def _next(link: Link) -> Message:
    message = link.receive(_PATIENCE)
    if message is None:
        raise FlowspecError(f"{link.name}: the other process does not answer")
    return message


def table(rows: list[HopRow]) -> str:
    """For people: one line a segment."""
    lines = [f"{'segment':>10}  {'bytes':>8}  {'bare hop':>9}  {'our hop':>9}  ratio"]
    for row in rows:
        shape = f"{row.rows}x{row.width}"
        lines.append(f"{shape:>10}  {row.size:>8}  {row.bare_us:>6.0f} us  {row.hop_us:>6.0f} us"
                     f"  {row.ratio:>5.2f}")
    return "\n".join(lines)


def main() -> None:
    """``python -m flowspec_edge.bench.micro_hop``"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    print(table([measure(rows, 4096, arguments.rounds) for rows in (1, 16, 64)]))


if __name__ == "__main__":
    main()
