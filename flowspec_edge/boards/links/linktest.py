"""Latency and bandwidth between two devices, over ZeroMQ as in the pipeline.

    python -m flowspec_edge.boards.links.linktest serve HOST PORT [--measurements N] [--seconds S]
    python -m flowspec_edge.boards.links.linktest measure HOST PORT [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import cast

import zmq

from flowspec_edge.errors import FlowspecError, UsageError

MESSAGE_BYTES = 128 * 1024  # a segment of a 7B model: 16 rows of 4096 fp16
PING_BYTES = 64
MAX_SECONDS = 30.0  # per measurement
MAX_BYTES = 8 * 1024**3

_HELLO = b"flowspec-link/1"
_PING, _DATA, _DONE, _REPORT = b"ping", b"data", b"done", b"report"
_PINGS = 50
_CONNECT_S = 3.0
_MAX_FLOWS = 64  # concurrent clients; the oldest is dropped
_QUEUE = 4  # messages at each end; small, so that little is in flight at the end
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """One direction of a link."""

    latency_ms: float  # half the median round trip of 64-byte messages
    mbps: float  # 10^6 bit/s of payload at the receiver, in 128 KiB messages


@dataclass(slots=True)
class _Flow:
    bytes: int = 0  # after the first message
    started: float = 0.0
    last: float = 0.0


def serve_link(host: str, port: int, seconds: float | None = None, measurements: int | None = None,
               ready: Callable[[int], None] | None = None) -> None:
    """Answer link measurements; received data is discarded, and there is no authentication.

    seconds, measurements  limits; None: until interrupted
    ready                  gets the port, a free one for ``port`` 0

    Raise UsageError if it cannot listen.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    if ":" in host:
        raise UsageError(f"cannot listen on {host}: links are measured over IPv4; give an IPv4 address, such "
                         "as 0.0.0.0")
    with _socket(zmq.ROUTER) as server:
        server.router_handover = True
        try:
            server.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        if ready:
            ready(int(cast(bytes, server.last_endpoint).decode().rpartition(":")[2]))
        flows: dict[bytes, _Flow] = {}
        while measurements is None or measurements > 0:
            remaining_ms = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1e3))
            if remaining_ms == 0 or not server.poll(remaining_ms, _POLLIN):
                return
            peer, *frames = server.recv_multipart()
            answer = _answer(flows, peer, frames)
            if answer:
                # NOBLOCK: a peer that does not read loses its answers.
                server.send_multipart([peer, *answer], zmq.NOBLOCK)
            if answer and answer[0] == _REPORT and measurements is not None:
                measurements -= 1


def _answer(flows: dict[bytes, _Flow], peer: bytes, frames: list[bytes]) -> list[bytes]:
    """Return the answer to ``frames``; none to data and to unknown messages."""
    kind = frames[0] if frames else b""
    if kind == _HELLO and len(frames) == 1:
        flows[peer] = _Flow()
        if len(flows) > _MAX_FLOWS:
            del flows[next(iter(flows))]
        return frames
    flow = flows.get(peer)
    if flow is None:
        return []
    if kind == _DATA and len(frames) == 2:
        flow.last = time.monotonic()
        if flow.started:
            flow.bytes += len(frames[1])
        else:
            flow.started = flow.last  # the rate excludes the first message
        return []
    if kind == _PING:
        return frames
    if kind == _DONE:
        del flows[peer]
        return [_REPORT, struct.pack("<Qd", flow.bytes, flow.last - flow.started)]
    return []


def measure_link(host: str, port: int, seconds: float = 1.0) -> LinkMeasure:
    """Send data for ``seconds``; raise UsageError for a time out of range, FlowspecError if no peer answers."""
    if not 0 < seconds <= MAX_SECONDS:
        raise UsageError(f"a link is measured for up to {MAX_SECONDS:g} s, not {seconds:g}")
    with _connected(host, port) as link:
        latency = median(_round_trips(link, host, port, _PINGS)) / 2
        _send_for(link, seconds)
        _send(link, [_DONE], host, port)
        kind, *body = _receive(link, host, port, MAX_SECONDS)
        if kind != _REPORT or len(body) != 1 or len(body[0]) != struct.calcsize("<Qd"):
            raise _no_peer(host, port)
        received, duration = struct.unpack("<Qd", body[0])
    if not received or duration <= 0:
        raise FlowspecError(f"{host}:{port}: too little arrived in {seconds:g} s to tell a rate; "
                            "measure longer")
    return LinkMeasure(latency * 1e3, received * 8 / duration / 1e6)


def round_trips(host: str, port: int, count: int) -> list[float]:
    """Measure the round-trip times, in s, of ``count`` messages of 64 bytes."""
    with _connected(host, port) as link:
        return _round_trips(link, host, port, count)


def _round_trips(link: zmq.Socket[bytes], host: str, port: int, count: int) -> list[float]:
    seconds = []
    body = bytes(PING_BYTES - len(_PING))
    for _ in range(count):
        start = time.perf_counter()
        _send(link, [_PING, body], host, port)
        if _receive(link, host, port, MAX_SECONDS) != [_PING, body]:
            raise _no_peer(host, port)
        seconds.append(time.perf_counter() - start)
    return seconds


def _send_for(link: zmq.Socket[bytes], seconds: float) -> None:
    message = bytes(MESSAGE_BYTES)
    end, remaining = time.monotonic() + seconds, MAX_BYTES // MESSAGE_BYTES
    while remaining and (now := time.monotonic()) < end:
        if link.poll(max(1, round((end - now) * 1e3)), _POLLOUT):
            link.send_multipart([_DATA, message], zmq.NOBLOCK, copy=False)
            remaining -= 1


@contextmanager
def _connected(host: str, port: int) -> Iterator[zmq.Socket[bytes]]:
    """Yield a socket whose peer has answered the handshake."""
    try:  # ZeroMQ would retry forever without an error
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)
        cause = "nothing listens there" if refused else (error.strerror or "no answer")
        raise FlowspecError(f"{host}:{port} cannot be reached: {cause}; on that device run "
                            f"`flowspec device peer`, and see that no firewall is between") from error
    with _socket(zmq.DEALER) as link:
        link.connect(f"tcp://{host}:{port}")
        _send(link, [_HELLO], host, port)
        if _receive(link, host, port, _CONNECT_S) != [_HELLO]:
            raise _no_peer(host, port)
        yield link


@contextmanager
def _socket(kind: int) -> Iterator[zmq.Socket[bytes]]:
    """Yield a socket in its own context, whose threads are then in the caller's network namespace."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    socket.set_hwm(_QUEUE)
    socket.linger = 0
    socket.maxmsgsize = 2 * MESSAGE_BYTES
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def _send(link: zmq.Socket[bytes], frames: list[bytes], host: str, port: int) -> None:
    if not link.poll(round(MAX_SECONDS * 1e3), _POLLOUT):
        raise FlowspecError(f"{host}:{port} has stopped accepting data: see whether `flowspec device peer` "
                             "still runs there")
    link.send_multipart(frames, zmq.NOBLOCK)


def _receive(link: zmq.Socket[bytes], host: str, port: int, within: float) -> list[bytes]:
    if not link.poll(round(within * 1e3), _POLLIN):
        raise _no_peer(host, port)
    return link.recv_multipart()


def _no_peer(host: str, port: int) -> FlowspecError:
    return FlowspecError(f"{host}:{port} does not answer as a flowspec peer of this release; on that device "
                         "run `flowspec device peer`, and give its port")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a link between two devices.")
    parser.add_argument("what", choices=["serve", "measure"])
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--measurements", type=int, default=None)
    options = parser.parse_args()
    try:
        if options.what == "serve":
            serve_link(options.host, options.port, options.seconds, options.measurements,
                       lambda port: print(json.dumps({"port": port}), flush=True))
        else:
            print(json.dumps(asdict(measure_link(options.host, options.port, options.seconds or 1.0))))
    except FlowspecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
