"""systemd's notification protocol (sd_notify): readiness, status and the watchdog.

The working loop itself calls :meth:`Notifier.alive`, so that systemd restarts a service that hangs.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

_TIMES = 4  # keep-alives per watchdog timeout
_SLOW_S = 900.0  # for one call that reads libraries or weights from a slow card; as TimeoutStartSec


class Notifier:
    """Thread-safe. Never raises; sends nothing without systemd."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read ``environment`` as set by systemd; with {} nothing is sent."""
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address[:1] == "@" else address
        self._within_s = _watchdog_s(environment)
        self._every_s = self._within_s / _TIMES
        self._ready = False
        self._alive_at = 0.0  # when the next keep-alive is due (time.monotonic)
        self._status = ""

    def ready(self, status: str) -> None:
        self._ready = True
        self._status = status
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self._send(f"STATUS={_line(text)}")

    def alive(self) -> None:
        """Call it often; it sends as often as the watchdog needs.

        Nothing is sent before :meth:`ready`: the first WATCHDOG=1 would arm the watchdog early, and TimeoutStartSec
        already limits the start.
        """
        if self._ready and self._every_s and (now := time.monotonic()) >= self._alive_at:
            self._alive_at = now + self._every_s
            self._send("WATCHDOG=1")

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Extend the watchdog's timeout to 15 minutes for one long call, such as loading a draft model."""
        extended = self._ready and self._within_s > 0
        if extended:
            self._send(_watchdog(_SLOW_S))
        try:
            yield
        finally:
            if extended:
                self._send(_watchdog(self._within_s))

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, words: str) -> None:
        if self._address[:1] not in ("/", "\0"):
            return
        with (suppress(OSError),  # a lost notification is no reason to end
              socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender):
            sender.sendto(words.encode(), self._address)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Return the watchdog's timeout in seconds; 0: none, or not for this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    is_for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) * 1e-6 if is_for_us and microseconds.isdigit() else 0.0


def _watchdog(seconds: float) -> str:
    """Return the message that sets the watchdog's timeout; it counts as a keep-alive."""
    return f"WATCHDOG_USEC={seconds * 1e6:.0f}"


def _line(text: str) -> str:
    return " ".join(text.split())
