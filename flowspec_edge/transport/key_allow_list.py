"""The public keys that each listening socket admits, through ZeroMQ's authentication protocol (ZAP)."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0  # between two lines on one address, since a refused peer retries at once
_MAX_LOGGED = 1000  # addresses that are remembered
_ADDRESS = 3  # frame of a ZAP request with the peer's address


@dataclass(frozen=True)
class _Credentials:
    allow_list: KeyAllowList
    keys: Collection[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        if key not in self.keys:
            self.allow_list.log_refusal(domain, key)
            return False
        return True


class KeyAllowList(ThreadAuthenticator):
    """The lists of one ZeroMQ context, checked in a thread; start it before binding a socket."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        super().__init__(context, log=logging.getLogger(f"{__name__}.zap"))
        self._address = ""
        self._logged: dict[tuple[str, str], float] = {}  # (socket, address) -> time.monotonic()

    def admit(self, name: str, keys: Collection[bytes]) -> None:
        """Admit only peers with one of ``keys`` (Z85) to the socket whose ZAP domain is ``name``."""
        self.configure_curve_callback(name, _Credentials(self, keys))

    def log_refusal(self, name: str, key: bytes) -> None:
        """Log a refusal once per address and interval; called in the authenticator's thread."""
        now, peer = time.monotonic(), (name, self._address)
        if now < self._logged.get(peer, -_LOG_INTERVAL_S) + _LOG_INTERVAL_S:
            return
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged[peer] = now
        log.warning("%s: %s is refused: its key %s is not on the list", name, self._address, key.decode())

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Also notes the peer's address for the log."""
        self._address = msg[_ADDRESS].decode(errors="replace") if len(msg) > _ADDRESS else "unknown address"
        await super().handle_zap_message(msg)
