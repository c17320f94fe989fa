"""Links between threads of one process, with the wire's codec, counters, limits and errors."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from flowspec_edge.errors import PeerFault, PeerLost, UsageError
from flowspec_edge.messages import Message
from flowspec_edge.transport.codec import decode, encode
from flowspec_edge.transport.keys import NO_PEERS


class _Box:
    """The queue of one end: (sender, frames), at most ``room`` of them."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.items: deque[tuple[str, list[bytes]]] = deque()
        self.bound_at: float | None = None
        self.closed_at: float | None = None

    def is_open(self) -> bool:
        return self.bound_at is not None and self.closed_at is None

    def has_room(self) -> bool:
        return self.is_open() and len(self.items) < self.room


class MemoryTransport:
    """A whole network: endpoints are any names; ``data_queue`` and ``control_queue`` bound the queues."""

    def __init__(self, data_queue: int = 8, control_queue: int = 1000) -> None:
        self.changed = threading.Condition()
        self._data_queue = data_queue
        self._control_queue = control_queue
        self._boxes: dict[str, _Box] = {}
        self._ends: list[MemoryLink | MemoryHub] = []

    def pull(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> MemoryLink:
        return self._keep(MemoryLink(self, name, inbox=self._bind(endpoint, self._data_queue)))

    def push(self, endpoint: str, name: str, peer_keys: Collection[bytes] = ()) -> MemoryLink:
        return self._keep(MemoryLink(self, name, outbox=self._box(endpoint, self._data_queue)))

    def hub(self, endpoint: str, name: str, peer_keys: Mapping[str, bytes] = NO_PEERS, fd: int = -1
            ) -> MemoryHub:
        inbox = self._bind(endpoint, self._control_queue)
        hub = MemoryHub(self, name, inbox, lambda peer: self._boxes.get(f"{endpoint}/{peer}"))
        self._ends.append(hub)
        return hub

    def control(self, endpoint: str, name: str, identity: str,
                peer_keys: Collection[bytes] = ()) -> MemoryLink:
        inbox = self._bind(f"{endpoint}/{identity}", self._control_queue)
        outbox = self._box(endpoint, self._control_queue)
        return self._keep(MemoryLink(self, name, inbox=inbox, outbox=outbox, identity=identity))

    def wait(self, incoming: Sequence[_End], outgoing: Sequence[MemoryLink], timeout: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: any(end.ready() for end in incoming)
                                  or any(end.has_room() for end in outgoing), timeout)

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _box(self, endpoint: str, room: int) -> _Box:
        with self.changed:
            return self._boxes.setdefault(endpoint, _Box(room))

    def _bind(self, endpoint: str, room: int) -> _Box:
        box = self._box(endpoint, room)
        if box.is_open():
            raise UsageError(f"cannot listen on {endpoint}: it is in use")
        box.bound_at, box.closed_at = time.monotonic(), None
        return box

    def _keep(self, link: MemoryLink) -> MemoryLink:
        self._ends.append(link)
        return link


class _End:
    def __init__(self, network: MemoryTransport, name: str, inbox: _Box | None) -> None:
        self.name = name
        self.bytes_in = 0
        self.bytes_out = 0
        self.dropped = 0
        self._changed = network.changed
        self._inbox = inbox

    def reject(self, reason: str, peer: str = "") -> None:
        """Always raises: every peer is a thread of this process."""
        raise PeerFault(f"{self.name}: {reason}", peer)

    def ready(self) -> bool:
        return self._inbox is not None and bool(self._inbox.items)

    def close(self) -> None:
        box = self._inbox
        with self._changed:
            if box is not None and box.closed_at is None:
                box.closed_at = time.monotonic()
                box.items.clear()
                self._changed.notify_all()

    def _put(self, box: _Box | None, sender: str, message: Message, timeout: float) -> bool:
        frames = [bytes(frame) for frame in encode(message)]  # copies: the sender may reuse its arrays
        with self._changed:
            if box is None or not self._changed.wait_for(box.has_room, timeout):
                return False
            box.items.append((sender, frames))
            self._changed.notify_all()
        self.bytes_out += sum(map(len, frames))
        return True

    def _get(self, timeout: float) -> tuple[str, Message] | None:
        box = self._inbox
        with self._changed:
            if box is None or not self._changed.wait_for(self.ready, timeout):
                return None
            sender, frames = box.items.popleft()
            self._changed.notify_all()
        self.bytes_in += sum(map(len, frames))
        return sender, decode(frames)


class MemoryLink(_End):
    def __init__(self, network: MemoryTransport, name: str, inbox: _Box | None = None,
                 outbox: _Box | None = None, identity: str = "") -> None:
        super().__init__(network, name, inbox)
        self._outbox = outbox
        self._identity = identity
        self._made_at = time.monotonic()

    def send(self, message: Message, timeout: float = 0.0) -> bool:
        return self._put(self._outbox, self._identity, message, timeout)

    def receive(self, timeout: float = 0.0) -> Message | None:
        item = self._get(timeout)
        return item and item[1]

    def has_room(self) -> bool:
        return self._outbox is not None and self._outbox.has_room()

    def disconnected_for(self) -> float:
        box = self._outbox
        if box is None or box.is_open():
            return 0.0
        return time.monotonic() - (box.closed_at or self._made_at)

    def failed_handshakes(self) -> int:
        return 0

    def disconnects(self) -> int:
        return int(self._outbox is not None and self._outbox.closed_at is not None)


class MemoryHub(_End):
    def __init__(self, network: MemoryTransport, name: str, inbox: _Box,
                 outbox: Callable[[str], _Box | None]) -> None:
        super().__init__(network, name, inbox)
        self._outbox = outbox

    def send(self, peer: str, message: Message) -> bool:
        box = self._outbox(peer)
        if box is None or box.closed_at is not None:
            raise PeerLost(f"{self.name}: {peer} is not connected")
        return self._put(box, "", message, 0.0)

    def receive(self, timeout: float = 0.0) -> tuple[str, Message] | None:
        return self._get(timeout)
