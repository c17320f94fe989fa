"""Latency and bandwidth between two boards without a release, over plain TCP (``linktest``: over ZeroMQ).

Piped into both boards' system Python: standard library only, Python 3.8.

    python3 - serve HOST PORT --seconds S      answer one connection, if it comes within S seconds
    python3 - measure HOST PORT --seconds S    send data for S seconds; print latency_ms and mbps
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import sys
import time
from statistics import median

MESSAGE_BYTES = 128 * 1024  # a segment of a 7B model: 16 rows of 4096 fp16
PING_BYTES = 64
PINGS = 50
_TIMEOUT_S = 10.0  # per send or receive
_REPORT = struct.Struct("!Qd")  # bytes after the first chunk, and their seconds


def serve(host: str, port: int, seconds: float) -> None:
    """Print the port, then answer one connection; raise TimeoutError if none comes within ``seconds``."""
    with socket.create_server((host, port)) as server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        server.settimeout(seconds)
        link, _ = server.accept()
    with link:
        _prepare(link)
        for _ in range(PINGS):
            link.sendall(_exactly(link, PING_BYTES))
        received, started, last = 0, 0.0, 0.0
        while chunk := link.recv(MESSAGE_BYTES):
            last = time.monotonic()
            if started:
                received += len(chunk)
            else:
                started = last  # the rate excludes the first chunk
        link.sendall(_REPORT.pack(received, last - started))


def measure(host: str, port: int, seconds: float) -> dict[str, float]:
    """Measure a link; keys and units as in ``linktest.LinkMeasure``.

    Raise OSError if no peer answers.
    """
    with socket.create_connection((host, port), _TIMEOUT_S) as link:
        _prepare(link)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            link.sendall(bytes(PING_BYTES))
            _exactly(link, PING_BYTES)
            trips.append(time.perf_counter() - start)
        message, end = bytes(MESSAGE_BYTES), time.monotonic() + seconds
        while time.monotonic() < end:
            link.sendall(message)
        link.shutdown(socket.SHUT_WR)
        received, duration = _REPORT.unpack(_exactly(link, _REPORT.size))
    if duration <= 0:
        raise OSError(f"too little arrived in {seconds:g} s to tell a rate")
    return {"latency_ms": median(trips) / 2 * 1e3, "mbps": received * 8 / duration / 1e6}


def _prepare(link: socket.socket) -> None:
    link.settimeout(_TIMEOUT_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(link: socket.socket, count: int) -> bytes:
    """Receive ``count`` bytes; raise ConnectionError if the other end closes before."""
    received = b""
    while len(received) < count:
        chunk = link.recv(count - len(received))
        if not chunk:
            raise ConnectionError("the other end closed the connection")
        received += chunk
    return received


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["serve", "measure"])
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    try:
        if options.what == "serve":
            serve(options.host, options.port, options.seconds)
        else:
            print(json.dumps(measure(options.host, options.port, options.seconds)))
    except OSError as error:
        sys.exit(f"{options.host}:{options.port}: {error.strerror or error}")


if __name__ == "__main__":
    main()
