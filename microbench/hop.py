"""A segment's hop between two processes, against a bare PUSH/PULL hop of the same bytes.

The bare hops send the same frames (``send_multipart``), and one blob as the lower bound; they are not
encrypted.  A hop includes encoding and decoding, and is measured with CURVE and without; the receiver falls
asleep before each hop, as in a pipeline.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import zmq

from flowspec_edge.boards.measurement.link import segment, spin
from flowspec_edge.errors import FlowspecError
from flowspec_edge.transport import keys
from flowspec_edge.transport.codec import encode
from flowspec_edge.transport.zmq_links import ZmqTransport
from microbench._common import Row, options, print_rows

_LOOPBACK = "tcp://127.0.0.1:*"
_BUSY_S = 0.5e-3
_TIMEOUT_S = 30.0


def measure(rows: int, width: int, hops: int) -> list[Row]:
    """Measure medians of ``hops`` hops by each way of sending, without the first tenth."""
    message = segment(width, "fp16", rows)
    frames = [bytes(frame) for frame in encode(message)]
    blob = b"".join(frames)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender, receiver = keys.generate(), keys.generate()
    child = context.Process(target=_receiver, args=(theirs, hops, receiver, sender.public))
    child.start()
    theirs.close()  # so that the pipe reports the end of the child
    transport, encrypted = ZmqTransport(), ZmqTransport(sender)
    try:
        link_address, curve_address, bare_address = ours.recv()
        with zmq.Context() as bare, bare.socket(zmq.PUSH) as bare_out:
            bare_out.connect(bare_address)
            link_out = transport.push(link_address, "hop out")
            curve_out = encrypted.push(curve_address, "encrypted hop out", [receiver.public])
            works: list[Callable[[], object]] = [
                lambda: bare_out.send(blob), lambda: bare_out.send_multipart(frames),
                lambda: link_out.send(message, _TIMEOUT_S), lambda: curve_out.send(message, _TIMEOUT_S),
            ]
            starts: list[list[float]] = []
            for _ in range(hops):
                starts.append([])
                for send in works:
                    spin(_BUSY_S)
                    starts[-1].append(time.perf_counter())
                    send()
                    ours.recv_bytes()
            ends = ours.recv()
    finally:
        transport.close()
        encrypted.close()
        child.join()
    times = np.subtract(ends, starts)[hops // 10:]  # [hops, 4] seconds
    as_blob, bare_hop, ours_us, curve = (np.median(times, axis=0) * 1e6).tolist()
    return [(f"a segment of {rows} x {width}, {len(blob)} bytes: as one blob", as_blob, "us"),
            ("  its frames, bare", bare_hop, "us"), ("  our hop", ours_us, "us"),
            ("  our hop / the bare one", ours_us / bare_hop, "x"), ("  our hop, encrypted", curve, "us")]


def _receiver(pipe: Connection, hops: int, pair: keys.KeyPair, sender: bytes) -> None:
    transport, encrypted = ZmqTransport(), ZmqTransport(pair)
    with zmq.Context() as bare, bare.socket(zmq.PULL) as bare_in:
        link_in = transport.pull(_LOOPBACK, "hop in")
        curve_in = encrypted.pull(_LOOPBACK, "encrypted hop in", [sender])
        bare_in.bind(_LOOPBACK)
        pipe.send((link_in.endpoint, curve_in.endpoint, bare_in.last_endpoint))
        works: list[Callable[[], object]] = [
            bare_in.recv, bare_in.recv_multipart, lambda: link_in.receive(_TIMEOUT_S),
            lambda: curve_in.receive(_TIMEOUT_S),
        ]
        ends: list[list[float]] = []
        for _ in range(hops):
            ends.append([])
            for receive in works:
                if receive() is None:
                    raise FlowspecError("the other process does not send")
                ends[-1].append(time.perf_counter())
                pipe.send_bytes(b".")
        pipe.send(ends)
    transport.close()
    encrypted.close()


def main() -> None:
    hops = options(__doc__, hops=500).hops
    for rows in (1, 16, 64):
        print_rows(measure(rows, 4096, hops))


if __name__ == "__main__":
    main()
