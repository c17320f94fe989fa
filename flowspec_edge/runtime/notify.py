"""What a service tells systemd of itself: that it is ready, how it is, that it is alive (sd_notify).

Knows the socket and the words of that protocol.  Does not know what makes a service ready or alive: a
word of life has to come from where the work is done, so that systemd starts a service anew that is stuck.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

_TIMES = 4  # words of life within the watchdog's time


class Notifier:
    """One service's; from any thread.  Nothing here fails, and without systemd nothing is sent."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """``environment``: that of the process, as systemd made it; {}: nobody wants to know."""
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address[:1] == "@" else address
        self._every_s = _watchdog_s(environment) / _TIMES
        self._alive_at = 0.0  # when the next word of life is due, of time.monotonic()
        self._status = ""

    def ready(self, status: str) -> None:
        """The service does its work from now on."""
        self._status = status
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, text: str) -> None:
        """How it is, in a line that ``systemctl status`` shows."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={_line(text)}")

    def alive(self) -> None:
        """To be called often by whoever does the work; sent as often as the watchdog needs it."""
        if self._every_s and (now := time.monotonic()) >= self._alive_at:
            self._alive_at = now + self._every_s
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """It is about to end."""
        self._send("STOPPING=1")

    def _send(self, words: str) -> None:
        if self._address[:1] not in ("/", "\0"):
            return
        with (suppress(OSError),  # a word that is lost is no reason to end
              socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender):
            sender.sendto(words.encode(), self._address)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Seconds within which systemd wants a word of life; 0: it does not, or not of this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    meant = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) * 1e-6 if meant and microseconds.isdigit() else 0.0


def _line(text: str) -> str:
    return " ".join(text.split())
