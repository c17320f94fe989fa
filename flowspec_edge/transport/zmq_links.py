"""Links over ZeroMQ: PUSH/PULL for data, one peer a socket; DEALER/ROUTER for control.

Knows sockets, their options, encryption and how a broken connection shows.  Does not know what is
sent when.  A peer that vanishes without a word is found by ZMTP heartbeats, which ZeroMQ's own
thread answers, however busy the peer is.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from flowspec_edge.errors import FlowspecError, PeerLost, ProtocolError, UsageError
from flowspec_edge.messages import Message
from flowspec_edge.transport.base import Hub, Link
from flowspec_edge.transport.codec import MAX_FRAMES, Buffer, decode, encode
from flowspec_edge.transport.gate import Gate
from flowspec_edge.transport.keys import KeyPair
from flowspec_edge.transport.reach import why_not_open

_EVENTS = (zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
           | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

# As plain integers: pyzmq's enums cost microseconds a hop.
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_RCVMORE, _RCVTIMEO = int(zmq.RCVMORE), int(zmq.RCVTIMEO)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


E = TypeVar("E", bound="End")


@dataclass(frozen=True, slots=True)
class Tuning:
    """Socket options; the defaults suit a LAN of small boards."""

    data_queue: int = 8  # messages at each end of a data link
    control_queue: int = 1000  # messages at each end of the control channel
    linger_ms: int = 1000  # how long close() waits for what was sent to leave
    heartbeat_ms: int = 1000
    silence_ms: int = 5000  # a peer that answers no heartbeat for so long is disconnected
    max_message_bytes: int = 256 * 1024 * 1024
    # Below this ZeroMQ copies: handing over a buffer costs two thread switches, about 20 µs.
    zero_copy_bytes: int = 512 * 1024


class End:
    """A socket, and how whole messages pass through it."""

    def __init__(self, socket: zmq.Socket[bytes], name: str, tuning: Tuning) -> None:
        self.socket = socket
        self.name = name
        self.bytes_in = 0
        self.bytes_out = 0
        self._zero_copy = tuning.zero_copy_bytes
        self._patience = -1  # the socket's receive timeout, ms; setting it anew costs more than knowing

    @property
    def endpoint(self) -> str:
        """The address that was bound, with the port that the system chose."""
        return cast(bytes, self.socket.last_endpoint).decode().rstrip("\0")

    def close(self) -> None:
        """See :class:`~flowspec_edge.transport.base.Link`."""
        self.socket.close()

    def _frames(self, message: Message, peer: str = "") -> list[Buffer]:
        """What is sent for ``message``, from a hub to ``peer``."""
        return encode(message)

    def _send(self, frames: Sequence[Buffer], timeout: float) -> bool:
        """Send one multipart message; False if there was no room within ``timeout`` seconds."""
        try:
            self._queue(frames)
        except zmq.Again:
            # A short queue looks full until ZeroMQ hears, milliseconds late, that the peer has
            # read; asking makes it listen.
            if not zmq.zmq_poll([(self.socket, _POLLOUT)], max(0, round(timeout * 1e3))):
                return False
            self._queue(frames)
        return True

    def _queue(self, frames: Sequence[Buffer]) -> None:
        """Send without blocking: zmq.Again comes with the first frame, for a message is queued whole."""
        left, size = len(frames), 0
        for frame in frames:
            left -= 1
            length = len(frame)
            size += length
            self.socket.send(frame, _MORE if left else _NOBLOCK, length < self._zero_copy)
        self.bytes_out += size

    def _receive(self, timeout: float, most: int) -> list[bytes] | None:
        """One multipart message, or None; of the frames beyond ``most`` one is kept, as a sign.

        pyzmq copies each frame into a bytes object: up to some 300 KB that is cheaper than its
        zero-copy Frame, it aligns the arrays, and it makes them read-only.
        """
        socket = self.socket
        try:
            if timeout > 0:
                patience = max(1, round(timeout * 1e3))
                if patience != self._patience:
                    socket.set(_RCVTIMEO, patience)
                    self._patience = patience
                frames = [socket.recv()]
            elif zmq.zmq_poll([(socket, _POLLIN)], 0):  # cheaper than the exception for an empty queue
                frames = [socket.recv(_NOBLOCK)]
            else:
                return None
        except zmq.Again:  # also for a peer in the middle of its handshake, which can look like a message
            return None
        size = len(frames[0])
        while socket.get(_RCVMORE):
            frame = socket.recv(_NOBLOCK)
            size += len(frame)
            if len(frames) <= most:
                frames.append(frame)
        self.bytes_in += size
        return frames


class ZmqLink(End):
    """A PUSH, PULL or DEALER socket with one peer."""

    def send(self, message: Message, timeout: float = 0.0) -> bool:
        """See :class:`~flowspec_edge.transport.base.Link`."""
        return self._send(self._frames(message), timeout)

    def receive(self, timeout: float = 0.0) -> Message | None:
        """See :class:`~flowspec_edge.transport.base.Link`."""
        frames = self._receive(timeout, MAX_FRAMES)
        if frames is None:
            return None
        try:
            return decode(frames)
        except ProtocolError as error:
            raise ProtocolError(f"{self.name}: {error}") from None


class ZmqClientLink(ZmqLink):
    """A connecting PUSH or DEALER socket, watched through ZeroMQ's monitor."""

    def __init__(self, socket: zmq.Socket[bytes], name: str, tuning: Tuning, address: str) -> None:
        super().__init__(socket, name, tuning)
        self._address = address
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._lost_at: float | None = time.monotonic()
        self._breaks = 0

    def lost_for(self) -> float:
        """See :class:`~flowspec_edge.transport.base.ClientLink`."""
        self._watch()
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def breaks(self) -> int:
        """See :class:`~flowspec_edge.transport.base.ClientLink`."""
        self._watch()
        return self._breaks

    def close(self) -> None:
        """See :class:`~flowspec_edge.transport.base.Link`."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close()
        super().close()

    def _watch(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(_NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost_at = None
            elif event == zmq.EVENT_DISCONNECTED:
                if self._lost_at is None:
                    self._lost_at = time.monotonic()
                    self._breaks += 1
            else:
                raise FlowspecError(f"{self.name}: {self._address} refuses this device's key; "
                                    "enrol the key there, or check that both sides use encryption")


class ZmqHub(End):
    """A ROUTER socket; a peer is known by the identity that its DEALER gave."""

    def send(self, peer: str, message: Message) -> bool:
        """See :class:`~flowspec_edge.transport.base.Hub`."""
        try:
            return self._send([peer.encode(), *self._frames(message, peer)], 0.0)
        except zmq.Again:  # a ROUTER looks ready as long as any peer has room
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise PeerLost(f"{self.name}: {peer} is not connected") from None

    def receive(self, timeout: float = 0.0) -> tuple[str, Message] | None:
        """See :class:`~flowspec_edge.transport.base.Hub`."""
        frames = self._receive(timeout, MAX_FRAMES + 1)
        if frames is None:
            return None
        peer = frames[0].decode(errors="replace")
        try:
            return peer, decode(frames[1:])
        except ProtocolError as error:
            raise ProtocolError(f"{self.name}, from {peer[:80]!r}: {error}") from None


class ZmqTransport:
    """Links in one ZeroMQ context; with ``keys``, every one of them is encrypted by CURVE.

    Without them nothing listens beyond loopback, unless that is meant (``unencrypted``).
    """

    # What links are made of; an emulation makes them of more.
    link_class: type[ZmqLink] = ZmqLink
    client_class: type[ZmqClientLink] = ZmqClientLink
    hub_class: type[ZmqHub] = ZmqHub

    def __init__(self, keys: KeyPair | None = None, tuning: Tuning | None = None,
                 unencrypted: bool = False) -> None:
        self._keys = keys
        self._unencrypted = unencrypted
        self._tuning = tuning or Tuning()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ends: list[End] = []
        self._gate: Gate | None = None

    def pull(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> ZmqLink:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        socket = self._socket(zmq.PULL, self._tuning.data_queue)
        bound = self._bind(socket, endpoint, name, peer_keys, fd)
        return self._keep(self.link_class(bound, name, self._tuning))

    def push(self, endpoint: str, name: str, peer_keys: Collection[bytes] = ()) -> ZmqClientLink:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        socket = self._socket(zmq.PUSH, self._tuning.data_queue)
        socket.immediate = True  # else what is queued in an outage reaches the peer's next life
        return self._connect(socket, endpoint, name, peer_keys)

    def hub(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> ZmqHub:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        socket = self._socket(zmq.ROUTER, self._tuning.control_queue)
        socket.router_handover = True
        socket.router_mandatory = True
        bound = self._bind(socket, endpoint, name, peer_keys, fd)
        return self._keep(self.hub_class(bound, name, self._tuning))

    def control(self, endpoint: str, name: str, identity: str,
                peer_keys: Collection[bytes] = ()) -> ZmqClientLink:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        socket = self._socket(zmq.DEALER, self._tuning.control_queue)
        socket.routing_id = identity.encode()
        return self._connect(socket, endpoint, name, peer_keys)

    def wait(self, incoming: Sequence[Link | Hub], outgoing: Sequence[Link], timeout: float) -> None:
        """See :class:`~flowspec_edge.transport.base.Transport`."""
        ends = [(cast(End, end).socket, _POLLIN) for end in incoming]
        ends += [(cast(End, end).socket, _POLLOUT) for end in outgoing]
        zmq.zmq_poll(ends, max(0, round(timeout * 1e3)))

    def close(self) -> None:
        """Close all links, also one that a signal kept from being complete, then the context.

        Takes at most the linger time.
        """
        for end in self._ends:
            end.close()
        if self._gate is not None:
            self._gate.stop()
            self._gate = None
        self._context.destroy()  # term() alone would wait for a socket that is in no link for ever

    def _socket(self, kind: int, queue: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(queue)
        socket.linger = self._tuning.linger_ms
        socket.maxmsgsize = self._tuning.max_message_bytes
        socket.heartbeat_ivl = self._tuning.heartbeat_ms
        socket.heartbeat_timeout = self._tuning.silence_ms
        socket.heartbeat_ttl = self._tuning.silence_ms
        return socket

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str, name: str, peer_keys: Collection[bytes],
              fd: int) -> zmq.Socket[bytes]:
        if self._keys is None and not self._unencrypted and (reason := why_not_open(endpoint)):
            socket.close()
            raise UsageError(f"{name}: {reason}")
        if self._keys is not None:
            # A domain of its own for every socket: its allow-list.  Without an authenticator
            # CURVE would let in any key.
            socket.zap_domain = name.encode()
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._guard().admit(name, peer_keys)
            socket.curve_secretkey = self._keys.secret
            socket.curve_publickey = self._keys.public
            socket.curve_server = True
        if fd >= 0:
            socket.setsockopt(zmq.USE_FD, fd)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            # What the system's state forbids, it may allow later.
            kind = FlowspecError if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else UsageError
            raise kind(f"{name}: cannot listen on {endpoint}: {error.strerror}") from error
        return socket

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str, name: str,
                 peer_keys: Collection[bytes]) -> ZmqClientLink:
        if self._keys is not None:
            (server_key,) = peer_keys
            socket.curve_serverkey = server_key
            socket.curve_secretkey = self._keys.secret
            socket.curve_publickey = self._keys.public
        link = self._keep(self.client_class(socket, name, self._tuning, endpoint))
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            link.close()
            raise UsageError(f"{name}: {endpoint} is no address to connect to: {error.strerror}") from error
        return link

    def _guard(self) -> Gate:
        if self._gate is None:
            self._gate = Gate(self._context)
            self._gate.start()
        return self._gate

    def _keep(self, end: E) -> E:
        self._ends.append(end)
        return end
