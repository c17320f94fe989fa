"""CURVE key pairs, their files, and the public keys that each listening socket admits.

Sockets ask through ZeroMQ's authentication protocol (ZAP).
A file holds a set of pairs, usually one.  While a board's keys are rotated, its file holds the pair of the running
release and that of the next one.  Each release names the public key of its pair.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.files import write_atomically

NO_PEERS: Mapping[str, bytes] = MappingProxyType({})
_MOST_BYTES = 4096  # of a key file; a pair has about 110
_NEWER = "newer"  # field of a key file, beside the fields of the oldest pair: earlier programs read only that one
_Z85 = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 text of 40 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"  # the secret must not reach a log


def generate() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def save(keys: KeyPair, path: Path, mode: int = 0o600, replace: bool = False,
         newer: Sequence[KeyPair] = ()) -> None:
    """Write atomically and durably; UsageError if the file exists and ``replace`` is false.

    ``newer``: the other pairs of the set, the newest last
    """
    data: dict[str, Any] = _fields(keys)
    if newer:
        data[_NEWER] = [_fields(pair) for pair in newer]
    try:
        write_atomically(path, f"{json.dumps(data)}\n", mode, replace)
    except FileExistsError:
        raise UsageError(f"{path} exists already; a key is not overwritten, remove it first") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def load(path: Path, public: str = "") -> KeyPair:
    """Return the file's pair with this public key, or its oldest pair if ``public`` is empty.

    UsageError if the file is missing or others may read it, FlowspecError if it is damaged or lacks the pair.
    """
    for pair in load_all(path):
        if public in ("", pair.public.decode()):
            return pair
    raise FlowspecError(f"{path} lacks the key pair of this release: flowspec deploy up")


def load_all(path: Path) -> list[KeyPair]:
    """Return the file's pairs, the newest last; raises as :func:`load`."""
    try:
        if path.stat().st_mode & 0o027:  # group may read: systemd's credentials are 0440
            raise UsageError(f"others can read or change the secret key {path}: chmod 600 {path}")
        with path.open("rb") as file:
            data = json.loads(file.read(_MOST_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read the key file {path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        data = None
    newer = data.get(_NEWER, []) if isinstance(data, dict) else []
    entries = [_pair(entry) for entry in (data, *(newer if isinstance(newer, list) else [None]))]
    pairs = [pair for pair in entries if pair]
    if len(pairs) < len(entries):
        raise FlowspecError(f"{path} is not a key file; make a new one")
    if any(zmq.curve_public(pair.secret) != pair.public for pair in pairs):
        raise FlowspecError(f"{path}: the two keys do not belong together; make new ones")
    return pairs


def _fields(pair: KeyPair) -> dict[str, str]:
    return {"public": pair.public.decode(), "secret": pair.secret.decode()}


def _pair(fields: object) -> KeyPair | None:
    if not isinstance(fields, dict):
        return None
    public, secret = _z85(fields.get("public")), _z85(fields.get("secret"))
    return KeyPair(public, secret) if public and secret else None


def parse_public(text: str) -> bytes:
    """Read a public key; UsageError if ``text`` is not 40 characters of Z85."""
    key = _z85(text)
    if key is None:
        raise UsageError(f"{text[:50]!r} is not a CURVE key: 40 characters of Z85 are expected")
    return key


def _z85(text: object) -> bytes | None:
    if not isinstance(text, str) or len(text) != 40:
        return None
    key = text.encode("ascii", "replace")
    return key if set(key) <= _Z85 else None


log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0  # between two lines on one address, since a refused peer retries at once
_MAX_LOGGED = 1000  # addresses that are remembered
_ADDRESS = 3  # frame of a ZAP request with the peer's address


class KeyAllowList(ThreadAuthenticator):
    """The lists of one ZeroMQ context, checked in a thread; start it before binding a socket."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        super().__init__(context, log=logging.getLogger(f"{__name__}.zap"))
        self._address = ""
        self._admitted: dict[str, Collection[bytes]] = {}
        self._logged: dict[tuple[str, str], float] = {}  # (socket, address) -> time.monotonic()

    def admit(self, name: str, keys: Collection[bytes]) -> None:
        """Admit only peers with one of ``keys`` (Z85) to the socket whose ZAP domain is ``name``."""
        self._admitted[name] = keys
        self.configure_curve_callback(name, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether to admit a peer; logs a refusal once per address and interval.

        Called in the authenticator's thread.
        """
        if key in self._admitted[domain]:
            return True
        now, peer = time.monotonic(), (domain, self._address)
        if now < self._logged.get(peer, -_LOG_INTERVAL_S) + _LOG_INTERVAL_S:
            return False
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged[peer] = now
        log.warning("%s: %s is refused: its key %s is not on the list", domain, self._address, key.decode())
        return False

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Handle a request of ZAP, and note the peer's address for the log."""
        self._address = msg[_ADDRESS].decode(errors="replace") if len(msg) > _ADDRESS else "unknown address"
        await super().handle_zap_message(msg)
