"""What can go wrong, as one line a person can act on.

Every error that a user may meet is a :class:`FlowspecError`; the command line prints its text
and exits with ``exit_code``, without a traceback.  Anything else that escapes is a bug.
"""

from __future__ import annotations


class FlowspecError(Exception):
    """A failure whose text says what, where and what to do."""

    exit_code = 1


class UsageError(FlowspecError):
    """The request itself is wrong: an unknown name, a value out of range, a missing file."""

    exit_code = 2


class ProtocolError(FlowspecError):
    """A peer sent something that the protocol does not allow."""


class PeerLost(FlowspecError):
    """A device stopped answering, or told us that it failed."""
