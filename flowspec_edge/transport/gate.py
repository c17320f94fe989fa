"""Who is let in: each listening socket's own list of public keys, and a line in the log for any other.

Knows ZeroMQ's authentication protocol (ZAP) as pyzmq runs it, in a thread of its own.  Does not know
whose keys they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

_AGAIN_S = 60.0  # who is refused tries again and again: a line in so many seconds will do
_MOST_TOLD = 1000  # strangers that are remembered
_ADDRESS = 3  # the frame of a request that says where it comes from


@dataclass(frozen=True)
class _List:
    """An allow-list in the form that pyzmq's authenticator asks for."""

    gate: Gate
    keys: Collection[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        if key not in self.keys:
            self.gate.refused(domain, key)
            return False
        return True


class Gate(ThreadAuthenticator):
    """The lists of one ZeroMQ context; must be started before a socket that it guards is bound."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        super().__init__(context, log=logging.getLogger(f"{__name__}.zap"))
        self._address = ""
        self._told: dict[tuple[str, str], float] = {}  # (socket, address) -> when, of time.monotonic()

    def admit(self, name: str, keys: Collection[bytes]) -> None:
        """To the socket whose ZAP domain is ``name``: who has one of ``keys``, Z85, and nobody else."""
        self.configure_curve_callback(name, _List(self, keys))

    def refused(self, name: str, key: bytes) -> None:
        """A line in the log, unless there was one of the same address just now; in the gate's thread."""
        now, who = time.monotonic(), (name, self._address)
        if now < self._told.get(who, -_AGAIN_S) + _AGAIN_S:
            return
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told[who] = now
        log.warning("%s: %s is refused: its key %s is not on the list", name, self._address, key.decode())

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """See pyzmq; notes whom the request is about."""
        self._address = msg[_ADDRESS].decode(errors="replace") if len(msg) > _ADDRESS else "somebody"
        await super().handle_zap_message(msg)
