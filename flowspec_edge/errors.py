"""Errors with one line of text that tells the user what to do.

The command line prints it and exits with ``exit_code``; any other exception that escapes is a bug.
"""

from __future__ import annotations

import signal
from contextlib import suppress


class FlowspecError(Exception):
    """The text says what failed, where, and what to do."""

    exit_code = 1


class UsageError(FlowspecError):
    """The request itself is wrong: an unknown name, a value out of range, a missing file."""

    exit_code = 2


class ProtocolError(FlowspecError):
    """A peer sent something that the protocol does not allow."""


class PeerFault(ProtocolError):
    """A peer whose key was checked broke the protocol; ``peer``: its identity on the control channel."""

    def __init__(self, text: str, peer: str = "") -> None:
        super().__init__(text, peer)
        self.peer = peer

    def __str__(self) -> str:
        return str(self.args[0])


class RequestFailed(FlowspecError):
    """One request cannot be completed; the cluster goes on with the others."""


class KeyRefused(FlowspecError):
    """The peer of the link ``link`` does not admit this device's key."""

    def __init__(self, link: str, text: str) -> None:
        super().__init__(text)
        self.link = link


class OtherRelease(FlowspecError):
    """The draft device belongs to another release than this stage; flowspec-verify@.service knows the exit code."""

    exit_code = 75


class PeerLost(FlowspecError):
    """A device stopped answering, or reported that it failed."""


def ended(code: int) -> str:
    """How a process ended, by ``subprocess``' return code: "exit code 3" or "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):  # a real-time signal has no name
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def first_line(error: Exception) -> str:
    return _lines(error)[0]


def last_line(error: Exception) -> str:
    """Return the reason, where a library tells first what it was doing."""
    return _lines(error)[-1].strip()


def _lines(error: Exception) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]
