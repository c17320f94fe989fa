"""Links with the byte count and the timing of a profile's model, over real ZeroMQ sockets.

With "made" links every message carries its arrival time, and the receiver holds it back until then: the
sender is free at once, as with a network card. With "real" links every message is padded to the profile's
bytes. The devices must share a clock, as on one machine.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

from flowspec_edge.drivers.virtual.links import added_bytes
from flowspec_edge.errors import ProtocolError
from flowspec_edge.lab.emulation.durations import Emulation, pause
from flowspec_edge.messages import Message
from flowspec_edge.transport.fields import Buffer
from flowspec_edge.transport.keys import NO_PEERS, KeyPair
from flowspec_edge.transport.zmq_links import Endpoint, ZmqClientLink, ZmqHub, ZmqLink, ZmqTransport

# The last frame of every message begins with the time.monotonic from which it may be received.
_STAMP = struct.Struct("<d")
_COARSE_S = 0.002  # shorter waits are exact, and receive nothing
_ZEROS = memoryview(bytes(1 << 20))


class _Channel:
    """One direction between two devices."""

    def __init__(self, emulation: Emulation, seconds: Callable[[int], tuple[float, float]]) -> None:
        self._profile = emulation.devices.d0
        self._emulated = emulation.links == "made"
        self._seconds = seconds
        self._free_at = self._next_free_at = 0.0

    def trailer(self, message: Message, size: int) -> Buffer:
        """Return the last frame of a message of ``size`` bytes."""
        extra_bytes = added_bytes(message, self._profile)
        if not self._emulated:
            if extra_bytes < 0:
                raise ProtocolError("the model's hidden states are wider than those of the profile")
            return _ZEROS[:extra_bytes + _STAMP.size] if extra_bytes < len(_ZEROS) - _STAMP.size else bytes(
                extra_bytes + _STAMP.size)
        occupied, latency = self._seconds(size + extra_bytes)
        self._next_free_at = max(self._free_at, time.monotonic()) + occupied
        return _STAMP.pack(self._next_free_at + latency)

    def confirm_sent(self) -> None:
        """Note that the socket accepted the message of the newest trailer."""
        self._free_at = self._next_free_at


class _Emulated(Endpoint):
    """Adds a trailer to what it sends, and holds back what it receives."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.channels: dict[str, _Channel] = {}  # by peer; a link has one, ""
        self._delayed: deque[tuple[float, list[bytes]]] = deque()
        self._newest: _Channel | None = None

    @property
    def due(self) -> float:
        return self._delayed[0][0] if self._delayed else math.inf

    def _frames(self, message: Message, peer: str = "") -> list[Buffer]:
        frames = super()._frames(message, peer)
        self._newest = self.channels.get(peer)
        trailer = self._newest.trailer(message, sum(map(len, frames))) if self._newest else bytes(_STAMP.size)
        return [*frames, trailer]

    def _send(self, frames: Sequence[Buffer], timeout: float) -> bool:
        accepted = super()._send(frames, timeout)
        if accepted and self._newest:
            self._newest.confirm_sent()
        return accepted

    def _receive(self, timeout: float, most: int) -> list[bytes] | None:
        until, patience = time.monotonic() + timeout, 0.0
        while True:
            while (frames := super()._receive(patience, most + 1)) is not None:
                if len(frames[-1]) < _STAMP.size:
                    self._drop("it came without its emulated time")
                    continue
                self._delayed.append((_STAMP.unpack_from(frames[-1])[0], frames[:-1]))
                patience = 0.0
            now = time.monotonic()
            if self.due <= now:
                return self._delayed.popleft()[1]
            if now >= until:
                return None
            patience = min(until, self.due) - now


class _EmulatedLink(_Emulated, ZmqLink):
    pass


class _EmulatedClientLink(_Emulated, ZmqClientLink):
    pass


class _EmulatedHub(_Emulated, ZmqHub):
    pass


class EmulatedTransport(ZmqTransport):
    """The links of one emulated device.

    ``rank``: 0 is D0, i is Vi. ``instances``: the stages' identities, V1's first; only D0 needs them.
    """

    link_class = _EmulatedLink
    client_class = _EmulatedClientLink
    hub_class = _EmulatedHub

    def __init__(self, emulation: Emulation, rank: int, instances: Sequence[str] = (),
                 keys: KeyPair | None = None, unencrypted: bool = False) -> None:
        super().__init__(keys, unencrypted=unencrypted)
        self._emulation = emulation
        self._rank = rank
        self._ranks = {instance: rank for rank, instance in enumerate(instances, start=1)}

    def push(self, endpoint: str, name: str, peer_keys: Collection[bytes] = ()) -> ZmqClientLink:
        last = self._rank == len(self._emulation.devices.stages)
        return self._on(super().push(endpoint, name, peer_keys), 0 if last else self._rank + 1)

    def control(self, endpoint: str, name: str, identity: str,
                peer_keys: Collection[bytes] = ()) -> ZmqClientLink:
        return self._on(super().control(endpoint, name, identity, peer_keys), 0)

    def hub(self, endpoint: str, name: str, peer_keys: Mapping[str, bytes] = NO_PEERS, fd: int = -1
            ) -> ZmqHub:
        hub = super().hub(endpoint, name, peer_keys, fd)
        channels = {peer: self._channel(rank) for peer, rank in self._ranks.items()}
        cast(_EmulatedHub, hub).channels = channels
        return hub

    def wait(self, incoming: Sequence[Endpoint], outgoing: Sequence[Endpoint], timeout: float) -> None:
        due_at = min((cast(_Emulated, end).due for end in incoming), default=math.inf)
        timeout = min(timeout, due_at - time.monotonic())
        if timeout >= _COARSE_S:
            super().wait(incoming, outgoing, math.floor(timeout * 1e3 - 1) / 1e3)  # ZeroMQ counts in ms
        else:
            pause(timeout)

    def _on(self, link: ZmqClientLink, receiver: int) -> ZmqClientLink:
        cast(_EmulatedClientLink, link).channels = {"": self._channel(receiver)}
        return link

    def _channel(self, receiver: int) -> _Channel:
        return _Channel(self._emulation, partial(self._emulation.devices.hop_seconds, self._rank, receiver))
