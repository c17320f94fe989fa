"""CURVE key pairs and their files.

Knows the format of a key file.  Does not know who may talk to whom.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp

import zmq

from flowspec_edge.errors import FlowspecError, UsageError

_Z85 = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A device's keys, Z85 text of 40 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"  # the secret must not reach a log


def generate() -> KeyPair:
    """A new key pair."""
    return KeyPair(*zmq.curve_keypair())


def save(keys: KeyPair, path: Path, mode: int = 0o600, replace: bool = False) -> None:
    """Write ``keys`` to a file that is there only when it is whole.

    mode     its permissions; only its owner may read it
    replace  whether it may take the place of another; else UsageError if there is one
    """
    text = json.dumps({"public": keys.public.decode(), "secret": keys.secret.decode()})
    try:
        fd, made = mkstemp(dir=path.parent, prefix=f".{path.name}-")  # nobody else can read it
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(text + "\n")
                file.flush()
                os.fchmod(fd, mode)
                os.fsync(fd)
            (os.replace if replace else os.link)(made, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(made)
    except FileExistsError:
        raise UsageError(f"{path} exists already; a key is not overwritten, remove it first") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def load(path: Path) -> KeyPair:
    """Read a key file.

    UsageError if there is none or if others may read it, FlowspecError if it is damaged or its
    halves do not belong together.
    """
    try:
        if path.stat().st_mode & 0o027:  # group may read: systemd's credentials are 0440
            raise UsageError(f"others can read or change the secret key {path}: chmod 600 {path}")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the key file {path}: {error.strerror}") from error
    except ValueError:
        data = None
    found = [_z85(data.get(half)) for half in ("public", "secret")] if isinstance(data, dict) else []
    if len(found) != 2 or None in found:
        raise FlowspecError(f"{path} is not a key file; make a new one")
    keys = KeyPair(*(key for key in found if key))
    if zmq.curve_public(keys.secret) != keys.public:
        raise FlowspecError(f"{path}: the two keys do not belong together; make new ones")
    return keys


def parse_public(text: str) -> bytes:
    """A public key as 40 bytes of Z85; UsageError if ``text`` is none."""
    key = _z85(text)
    if key is None:
        raise UsageError(f"{text[:50]!r} is not a CURVE key: 40 characters of Z85 are expected")
    return key


def _z85(text: object) -> bytes | None:
    if not isinstance(text, str) or len(text) != 40:
        return None
    key = text.encode("ascii", "replace")
    return key if set(key) <= _Z85 else None
