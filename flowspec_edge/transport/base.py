"""The interfaces of a transport: links between two devices, and D0's hub for the control channel.

Links carry messages in order, count encoded bytes, and neither block nor buffer without bound: ``send``
returns False when the peer cannot take more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from flowspec_edge.messages import Message

NO_PEERS: Mapping[str, bytes] = MappingProxyType({})


class Link(Protocol):
    name: str
    bytes_in: int
    bytes_out: int
    dropped: int  # messages from peers without keys that were rejected, or could not be read

    def send(self, message: Message, timeout: float = 0.0) -> bool:
        """Queue ``message``; False if there was no room within ``timeout`` seconds."""

    def receive(self, timeout: float = 0.0) -> Message | None:
        """None if nothing arrived within ``timeout`` seconds; anything but a message is rejected."""

    def reject(self, reason: str) -> None:
        """The peer's last message breaks the protocol: PeerFault, which names the link, if the peer's key was
        checked. Otherwise anybody may have sent it: it is dropped, counted and logged."""

    def close(self) -> None:
        """Queued messages still have a moment to leave."""


class ClientLink(Link, Protocol):
    """The connecting end."""

    def disconnected_for(self) -> float:
        """Seconds without a connection; 0 while connected.  KeyRefused if the peer refuses our key."""

    def disconnects(self) -> int:
        """How often the connection broke; messages may have been lost each time."""

    def failed_handshakes(self) -> int:
        """Since the last connection: attempts at which the peer answered, but its key is not the expected
        one, or it left."""


class Hub(Protocol):
    """D0's end of the control channel, which identifies stages by their instance ids."""

    bytes_in: int
    bytes_out: int
    dropped: int  # as of a Link, and messages with another key than their sender's

    def send(self, peer: str, message: Message) -> bool:
        """False if there is no room, PeerLost if ``peer`` is not connected."""

    def receive(self, timeout: float = 0.0) -> tuple[str, Message] | None:
        """The sender and the next message; None if none arrived within ``timeout`` seconds."""

    def reject(self, reason: str, peer: str) -> None:
        """As :meth:`Link.reject`, for a message from ``peer``."""

    def close(self) -> None:
        ...


class Transport(Protocol):
    """``peer_keys``, with encryption: the keys that a bound end admits (of a hub: by the peer's identity,
    which no other key can use), or the one key of the bound end."""

    def pull(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> Link:
        """Bind the receiving end of a data link; ``fd``: a listening socket that is already bound."""

    def push(self, endpoint: str, name: str, peer_keys: Collection[bytes] = ()) -> ClientLink:
        """Connect the sending end of a data link."""

    def hub(self, endpoint: str, name: str, peer_keys: Mapping[str, bytes] = NO_PEERS, fd: int = -1) -> Hub:
        """Bind D0's end of the control channel."""

    def control(self, endpoint: str, name: str, identity: str,
                peer_keys: Collection[bytes] = ()) -> ClientLink:
        """Connect a stage's end of the control channel; ``identity`` is its instance id."""

    def wait(self, incoming: Sequence[Link | Hub], outgoing: Sequence[Link], timeout: float) -> None:
        """Sleep until an ``incoming`` has a message, an ``outgoing`` has room, or ``timeout`` seconds
        pass."""

    def close(self) -> None:
        ...
