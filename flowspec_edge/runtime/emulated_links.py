"""Links that weigh what a profile's model would make them weigh, over real ZeroMQ sockets.

With made links every message carries the moment at which it would have arrived, and the receiver
holds it back until then: the sender is free at once, as with a network card.  With real links every
message is padded to the profile's bytes, and the network under it takes its own time.  Only for
devices that share a clock, that is, for one machine.  Does not know who computes what.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Message
from flowspec_edge.runtime.emulation import Emulation, pause
from flowspec_edge.runtime.events import added_bytes
from flowspec_edge.transport.base import Hub, Link
from flowspec_edge.transport.codec import Buffer
from flowspec_edge.transport.keys import KeyPair
from flowspec_edge.transport.zmq_links import End, ZmqClientLink, ZmqHub, ZmqLink, ZmqTransport

# The last frame of every message begins with the time.monotonic from which it may be received.
_STAMP = struct.Struct("<d")
_COARSE_S = 0.002  # shorter waits are exact, and hear nothing
_ZEROS = memoryview(bytes(1 << 20))


class _Line:
    """One direction between two devices: what a message weighs, and when it is there."""

    def __init__(self, emulation: Emulation, seconds: Callable[[int], tuple[float, float]]) -> None:
        self._profile = emulation.devices.d0
        self._made = emulation.links == "made"
        self._seconds = seconds
        self._free_at = self._next_free_at = 0.0

    def trailer(self, message: Message, size: int) -> Buffer:
        """The frame to add to a message that has ``size`` bytes now."""
        added = added_bytes(message, self._profile)
        if not self._made:
            if added < 0:
                raise ProtocolError("the model's hidden states are wider than those of the profile")
            return _ZEROS[:added + _STAMP.size] if added < len(_ZEROS) - _STAMP.size else bytes(
                added + _STAMP.size)
        occupied, latency = self._seconds(size + added)
        self._next_free_at = max(self._free_at, time.monotonic()) + occupied
        return _STAMP.pack(self._next_free_at + latency)

    def sent(self) -> None:
        """The newest trailer's message has gone: there was room for it."""
        self._free_at = self._next_free_at


class _Emulated(End):
    """An end that adds a trailer to what it sends, and holds back what it receives."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lines: dict[str, _Line] = {}  # by peer; a link has one, ""
        self._held: deque[tuple[float, list[bytes]]] = deque()
        self._newest: _Line | None = None

    @property
    def due(self) -> float:
        """When the oldest message that is held back may be received."""
        return self._held[0][0] if self._held else math.inf

    def _frames(self, message: Message, peer: str = "") -> list[Buffer]:
        frames = super()._frames(message, peer)
        self._newest = self.lines.get(peer)
        trailer = self._newest.trailer(message, sum(map(len, frames))) if self._newest else bytes(_STAMP.size)
        return [*frames, trailer]

    def _send(self, frames: Sequence[Buffer], timeout: float) -> bool:
        taken = super()._send(frames, timeout)
        if taken and self._newest:
            self._newest.sent()
        return taken

    def _receive(self, timeout: float, most: int) -> list[bytes] | None:
        until, patience = time.monotonic() + timeout, 0.0
        while True:
            while (frames := super()._receive(patience, most + 1)) is not None:
                if len(frames[-1]) < _STAMP.size:
                    raise ProtocolError(f"{self.name}: a message came without its emulated time")
                self._held.append((_STAMP.unpack_from(frames[-1])[0], frames[:-1]))
                patience = 0.0
            now = time.monotonic()
            if self.due <= now:
                return self._held.popleft()[1]
            if now >= until:
                return None
            patience = min(until, self.due) - now


class _EmulatedLink(_Emulated, ZmqLink):
    """See the bases."""


class _EmulatedClientLink(_Emulated, ZmqClientLink):
    """See the bases."""


class _EmulatedHub(_Emulated, ZmqHub):
    """See the bases."""


class EmulatedTransport(ZmqTransport):
    """The links of one device: ``place`` 0 is D0's, i that of Vi.

    ``instances``: the stages' identities on the control channel, V1's first; only D0 needs them.
    """

    link_class = _EmulatedLink
    client_class = _EmulatedClientLink
    hub_class = _EmulatedHub

    def __init__(self, emulation: Emulation, place: int, instances: Sequence[str] = (),
                 keys: KeyPair | None = None, unencrypted: bool = False) -> None:
        super().__init__(keys, unencrypted=unencrypted)
        self._emulation = emulation
        self._place = place
        self._places = {instance: place for place, instance in enumerate(instances, start=1)}

    def push(self, endpoint: str, name: str, peer_keys: Collection[bytes] = ()) -> ZmqClientLink:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        last = self._place == len(self._emulation.devices.stages)
        return self._on(super().push(endpoint, name, peer_keys), 0 if last else self._place + 1)

    def control(self, endpoint: str, name: str, identity: str,
                peer_keys: Collection[bytes] = ()) -> ZmqClientLink:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        return self._on(super().control(endpoint, name, identity, peer_keys), 0)

    def hub(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> ZmqHub:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        hub = super().hub(endpoint, name, peer_keys, fd)
        cast(_EmulatedHub, hub).lines = {peer: self._line(place) for peer, place in self._places.items()}
        return hub

    def wait(self, incoming: Sequence[Link | Hub], outgoing: Sequence[Link], timeout: float) -> None:
        """See :class:`~flowspec_edge.transport.base.Transport`; also until something held back is due."""
        due = min((cast(_Emulated, end).due for end in incoming), default=math.inf)
        timeout = min(timeout, due - time.monotonic())
        if timeout >= _COARSE_S:
            super().wait(incoming, outgoing, math.floor(timeout * 1e3 - 1) / 1e3)  # ZeroMQ counts in ms
        else:
            pause(timeout)

    def _on(self, link: ZmqClientLink, receiver: int) -> ZmqClientLink:
        cast(_EmulatedClientLink, link).lines = {"": self._line(receiver)}
        return link

    def _line(self, receiver: int) -> _Line:
        return _Line(self._emulation, partial(self._emulation.devices.hop_seconds, self._place, receiver))
