"""The interface of every transport: links between two devices, and D0's hub for all of them.

Knows the words, not the wires; ``zmq_links`` has the real ones, ``memory`` those for one process.
A link carries messages in order, counts encoded bytes, and neither blocks nor buffers without
bound: ``send`` says False when the peer cannot take more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from flowspec_edge.messages import Message


class Link(Protocol):
    """One end of a connection to one peer."""

    name: str
    bytes_in: int
    bytes_out: int

    def send(self, message: Message, timeout: float = 0.0) -> bool:
        """Hand ``message`` over; False if there was no room within ``timeout`` seconds."""

    def receive(self, timeout: float = 0.0) -> Message | None:
        """The next message; None if none came within ``timeout`` seconds.

        ProtocolError, which names the link, for anything that is not a message.
        """

    def close(self) -> None:
        """Give the link up; what was sent still has a moment to leave."""


class ClientLink(Link, Protocol):
    """The connecting end, which knows whether the other end is there."""

    def lost_for(self) -> float:
        """Seconds without a connection: since it broke, or since this end began to connect.

        FlowspecError if the peer refuses this device's key.
        """

    def breaks(self) -> int:
        """How often the connection has broken; each time messages may have been lost."""


class Hub(Protocol):
    """D0's end of the control channel: one link a stage, told apart by instance ids."""

    bytes_in: int
    bytes_out: int

    def send(self, peer: str, message: Message) -> bool:
        """Hand ``message`` over; False if there is no room, PeerLost if ``peer`` is not connected."""

    def receive(self, timeout: float = 0.0) -> tuple[str, Message] | None:
        """The next message and who sent it; None if none came within ``timeout`` seconds."""

    def close(self) -> None:
        """Give all links up."""


class Transport(Protocol):
    """Makes links.  ``peer_keys``, where connections are encrypted, are the public keys of the
    peers: whom a bound end lets in, or which (one) key the end connected to must have."""

    def pull(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> Link:
        """Bind the receiving end of a data link; ``fd``, a listening socket that is bound already."""

    def push(self, endpoint: str, name: str, peer_keys: Collection[bytes] = ()) -> ClientLink:
        """Connect the sending end of a data link."""

    def hub(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> Hub:
        """Bind D0's end of the control channel."""

    def control(self, endpoint: str, name: str, identity: str,
                peer_keys: Collection[bytes] = ()) -> ClientLink:
        """Connect a stage's end of the control channel; ``identity`` is its instance id."""

    def wait(self, incoming: Sequence[Link | Hub], outgoing: Sequence[Link], timeout: float) -> None:
        """Sleep until one of ``incoming`` has a message, one of ``outgoing`` has room, or
        ``timeout`` seconds have passed."""

    def close(self) -> None:
        """Close every link made here."""
