"""Links within one process: the same interface and the same bytes, without sockets.

One :class:`MemoryTransport` stands for the whole network; threads are its devices.  Messages go
through the codec, so counters, limits and errors are those of the wire.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from flowspec_edge.errors import PeerLost, UsageError
from flowspec_edge.messages import Message
from flowspec_edge.transport.base import Hub, Link
from flowspec_edge.transport.codec import decode, encode


class _Box:
    """Messages on their way to one end: (sender, frames), at most ``room`` of them."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.items: deque[tuple[str, list[bytes]]] = deque()
        self.bound_at: float | None = None
        self.closed_at: float | None = None

    def is_open(self) -> bool:
        return self.bound_at is not None and self.closed_at is None


class MemoryTransport:
    """Endpoints are any names; ``data_queue`` and ``control_queue`` bound the messages under way."""

    def __init__(self, data_queue: int = 8, control_queue: int = 1000) -> None:
        self.changed = threading.Condition()
        self._data_queue = data_queue
        self._control_queue = control_queue
        self._boxes: dict[str, _Box] = {}
        self._ends: list[MemoryLink | MemoryHub] = []

    def pull(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> MemoryLink:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        return self._keep(MemoryLink(self, name, inbox=self._bind(endpoint, self._data_queue)))

    def push(self, endpoint: str, name: str, peer_keys: Collection[bytes] = ()) -> MemoryLink:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        return self._keep(MemoryLink(self, name, outbox=self._box(endpoint, self._data_queue)))

    def hub(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> MemoryHub:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        inbox = self._bind(endpoint, self._control_queue)
        hub = MemoryHub(self, name, inbox, lambda peer: self._boxes.get(f"{endpoint}/{peer}"))
        self._ends.append(hub)
        return hub

    def control(self, endpoint: str, name: str, identity: str,
                peer_keys: Collection[bytes] = ()) -> MemoryLink:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        inbox = self._bind(f"{endpoint}/{identity}", self._control_queue)
        outbox = self._box(endpoint, self._control_queue)
        return self._keep(MemoryLink(self, name, inbox=inbox, outbox=outbox, identity=identity))

    def wait(self, incoming: Sequence[Link | Hub], outgoing: Sequence[Link], timeout: float) -> None:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        with self.changed:
            self.changed.wait_for(
                lambda: any(end.ready() for end in incoming if isinstance(end, MemoryLink | MemoryHub))
                or any(end.has_room() for end in outgoing if isinstance(end, MemoryLink)), timeout)

    def close(self) -> None:
        """Close every link."""
        for end in self._ends:
            end.close()

    def _box(self, endpoint: str, room: int) -> _Box:
        with self.changed:
            return self._boxes.setdefault(endpoint, _Box(room))

    def _bind(self, endpoint: str, room: int) -> _Box:
        box = self._box(endpoint, room)
        if box.is_open():
            raise UsageError(f"cannot listen on {endpoint}: something else does")
        box.bound_at, box.closed_at = time.monotonic(), None
        return box

    def _keep(self, link: MemoryLink) -> MemoryLink:
        self._ends.append(link)
        return link


class MemoryLink:
    """Either direction or both; implements ``Link`` and ``ClientLink``."""

    def __init__(self, network: MemoryTransport, name: str, inbox: _Box | None = None,
                 outbox: _Box | None = None, identity: str = "") -> None:
        self.name = name
        self.bytes_in = 0
        self.bytes_out = 0
        self._network = network
        self._inbox = inbox
        self._outbox = outbox
        self._identity = identity
        self._made_at = time.monotonic()

    def send(self, message: Message, timeout: float = 0.0) -> bool:
        """See :class:`~flowspec_edge.transport.base.Link`."""
        size = _put(self._network, self._outbox, self._identity, message, timeout)
        self.bytes_out += size
        return size > 0

    def receive(self, timeout: float = 0.0) -> Message | None:
        """See :class:`~flowspec_edge.transport.base.Link`."""
        item = _get(self._network, self._inbox, timeout)
        if item is None:
            return None
        self.bytes_in += sum(map(len, item[1]))
        return decode(item[1])

    def ready(self) -> bool:
        """Whether a message is there."""
        return self._inbox is not None and bool(self._inbox.items)

    def has_room(self) -> bool:
        """Whether a message would be taken."""
        return _has_room(self._outbox)

    def lost_for(self) -> float:
        """See :class:`~flowspec_edge.transport.base.ClientLink`."""
        box = self._outbox
        if box is None or box.is_open():
            return 0.0
        return time.monotonic() - (box.closed_at or self._made_at)

    def breaks(self) -> int:
        """See :class:`~flowspec_edge.transport.base.ClientLink`."""
        return int(self._outbox is not None and self._outbox.closed_at is not None)

    def close(self) -> None:
        """See :class:`~flowspec_edge.transport.base.Link`."""
        _shut(self._network, self._inbox)


class MemoryHub:
    """D0's end of the control channel; implements ``Hub``."""

    def __init__(self, network: MemoryTransport, name: str, inbox: _Box,
                 outbox: Callable[[str], _Box | None]) -> None:
        self.name = name
        self.bytes_in = 0
        self.bytes_out = 0
        self._network = network
        self._inbox = inbox
        self._outbox = outbox

    def send(self, peer: str, message: Message) -> bool:
        """See :class:`~flowspec_edge.transport.base.Hub`."""
        box = self._outbox(peer)
        if box is None or box.closed_at is not None:
            raise PeerLost(f"{self.name}: {peer} is not connected")
        size = _put(self._network, box, "", message, 0.0)
        self.bytes_out += size
        return size > 0

    def receive(self, timeout: float = 0.0) -> tuple[str, Message] | None:
        """See :class:`~flowspec_edge.transport.base.Hub`."""
        item = _get(self._network, self._inbox, timeout)
        if item is None:
            return None
        self.bytes_in += sum(map(len, item[1]))
        return item[0], decode(item[1])

    def ready(self) -> bool:
        """Whether a message is there."""
        return bool(self._inbox.items)

    def close(self) -> None:
        """See :class:`~flowspec_edge.transport.base.Hub`."""
        _shut(self._network, self._inbox)


def _has_room(box: _Box | None) -> bool:
    return box is not None and box.is_open() and len(box.items) < box.room


def _put(network: MemoryTransport, box: _Box | None, sender: str, message: Message, timeout: float) -> int:
    frames = [bytes(frame) for frame in encode(message)]  # copies: the sender may reuse its arrays
    with network.changed:
        if box is None or not network.changed.wait_for(lambda: _has_room(box), timeout):
            return 0
        box.items.append((sender, frames))
        network.changed.notify_all()
    return sum(map(len, frames))


def _get(network: MemoryTransport, box: _Box | None, timeout: float) -> tuple[str, list[bytes]] | None:
    with network.changed:
        if box is None or not network.changed.wait_for(lambda: bool(box.items), timeout):
            return None
        item = box.items.popleft()
        network.changed.notify_all()
    return item


def _shut(network: MemoryTransport, box: _Box | None) -> None:
    with network.changed:
        if box is not None and box.closed_at is None:
            box.closed_at = time.monotonic()
            box.items.clear()
            network.changed.notify_all()
