"""Links over ZeroMQ: PUSH/PULL for data, one peer per socket; DEALER/ROUTER for control.

They carry messages in order, count encoded bytes, and neither block nor buffer without bound.
Both ends detect a vanished peer by the kernel's TCP timers. A stage also sends ZMTP heartbeats on the control
channel, where D0's socket may have given its name to another connection. libzmq 4.3.5 aborts the process that
reads a heartbeat, or has one due, on a connection that broke while messages waited for a full queue. So data
links, whose queues are short, have no heartbeats, and the control channel has no limit for what was received.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from flowspec_edge.errors import FlowspecError, KeyRefused, PeerFault, PeerLost, ProtocolError, UsageError
from flowspec_edge.messages import Message, Refusal
from flowspec_edge.transport.bind_check import unencrypted_bind_problem
from flowspec_edge.transport.codec import MAX_FRAMES, decode, encode
from flowspec_edge.transport.fields import Buffer
from flowspec_edge.transport.keys import NO_PEERS, KeyAllowList, KeyPair

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0  # between two lines on an endpoint's dropped messages
SHOWN = 80  # characters of an unknown peer's identity

# As plain integers: pyzmq's enums cost microseconds a hop.
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE, _RCVTIMEO = int(zmq.RCVMORE), int(zmq.RCVTIMEO)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Socket options; the defaults suit a LAN of small boards."""

    data_queue: int = 8  # messages at each end of a data link
    control_queue: int = 1000  # messages that wait to be sent at each end of the control channel
    linger_ms: int = 1000  # how long close() waits for queued messages to leave
    heartbeat_ms: int = 1000
    silence_ms: int = 5000  # without an answer from the peer's kernel, until the peer is disconnected
    max_message_bytes: int = 256 * 1024 * 1024
    # Below this ZeroMQ copies: passing a buffer by reference costs two thread switches, about 20 µs.
    zero_copy_bytes: int = 512 * 1024


class Endpoint:
    """An end of a link.

    ``authenticated``: CURVE has checked the peers' keys; ``dropped``: messages from peers without keys.
    """

    def __init__(self, socket: zmq.Socket[bytes], name: str, tuning: Tuning) -> None:
        self.socket = socket
        self.name = name
        self.bytes_in = 0
        self.bytes_out = 0
        self.authenticated = socket.get(zmq.MECHANISM) == zmq.CURVE
        self.dropped = 0
        self._log_at = 0.0
        self._zero_copy = tuning.zero_copy_bytes
        self._timeout_ms = -1  # the socket's receive timeout, remembered because setting it is slow

    @property
    def endpoint(self) -> str:
        """The address, with the port that the system chose."""
        return cast(bytes, self.socket.last_endpoint).decode().rstrip("\0")

    def close(self) -> None:
        """Queued messages still have a moment to leave."""
        self.socket.close()

    def reject(self, reason: str, peer: str = "") -> None:
        """PeerFault, which names the link, if the last message's peer proved its key; else it is dropped."""
        if peer:
            reason = f"from {peer[:SHOWN]!r}: {reason}"
        if self.authenticated:
            raise PeerFault(f"{self.name}: {reason}", peer)
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + _LOG_INTERVAL_S
            log.warning("%s: dropped a message, number %d: %s", self.name, self.dropped, reason)

    def _frames(self, message: Message, peer: str = "") -> list[Buffer]:
        """Encode a message for ``peer``, a hub's receiver; subclasses may add frames."""
        return encode(message)

    def _send(self, frames: Sequence[Buffer], timeout: float) -> bool:
        """Send one multipart message; False if there was no room within ``timeout`` seconds."""
        try:
            self._queue(frames)
        except zmq.Again:
            # ZeroMQ learns milliseconds late that the peer has read from a short queue; polling updates it.
            if not zmq.zmq_poll([(self.socket, POLLOUT)], max(0, round(timeout * 1e3))):
                return False
            self._queue(frames)
        return True

    def _queue(self, frames: Sequence[Buffer]) -> None:
        """Send without blocking; a message is queued whole, so zmq.Again comes with the first frame."""
        remaining, size = len(frames), 0
        for frame in frames:
            remaining -= 1
            length = len(frame)
            size += length
            self.socket.send(frame, _MORE if remaining else NOBLOCK, length < self._zero_copy)
        self.bytes_out += size

    def _receive(self, timeout: float, most: int) -> list[bytes] | None:
        """One multipart message, or None.

        Of the frames beyond ``most`` one is kept, as evidence.  pyzmq copies frames into aligned bytes: up to about
        300 KB cheaper than its zero-copy Frame.
        """
        socket = self.socket
        try:
            if timeout > 0:
                timeout_ms = max(1, round(timeout * 1e3))
                if timeout_ms != self._timeout_ms:
                    socket.set(_RCVTIMEO, timeout_ms)
                    self._timeout_ms = timeout_ms
                frames = [self._receive_first(0)]
            elif zmq.zmq_poll([(socket, POLLIN)], 0):  # cheaper than the exception for an empty queue
                frames = [self._receive_first(NOBLOCK)]
            else:
                return None
        except zmq.Again:  # also in the middle of a handshake, which can look like a message
            return None
        size = len(frames[0])
        while socket.get(_RCVMORE):
            frame = socket.recv(NOBLOCK)
            size += len(frame)
            if len(frames) <= most:
                frames.append(frame)
        self.bytes_in += size
        return frames

    def _receive_first(self, flags: int) -> bytes:
        return self.socket.recv(flags)


_EVENTS = (zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
           | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

E = TypeVar("E", bound=Endpoint)


class ZmqLink(Endpoint):
    """A PUSH, PULL or DEALER socket with one peer."""

    def send(self, message: Message, timeout: float = 0.0) -> bool:
        """Queue ``message``; False if there was no room within ``timeout`` seconds."""
        return self._send(self._frames(message), timeout)

    def receive(self, timeout: float = 0.0) -> Message | None:
        """Receive a message; None if nothing arrived within ``timeout`` seconds; anything but a message is rejected."""
        frames = self._receive(timeout, MAX_FRAMES)
        if frames is None:
            return None
        try:
            return decode(frames)
        except ProtocolError as error:
            self.reject(str(error))
        return None  # not the next message: a flood of wrong ones must not keep the caller here


class ZmqClientLink(ZmqLink):
    """A connecting PUSH or DEALER socket, observed through ZeroMQ's monitor."""

    def __init__(self, socket: zmq.Socket[bytes], name: str, tuning: Tuning, address: str) -> None:
        super().__init__(socket, name, tuning)
        self._address = address
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._disconnected_at: float | None = time.monotonic()
        self._disconnects = 0
        self._failed_handshakes = 0

    def disconnected_for(self) -> float:
        """Seconds without a connection; 0 while connected.  KeyRefused if the peer refuses our key."""
        self._watch()
        return 0.0 if self._disconnected_at is None else time.monotonic() - self._disconnected_at

    def disconnects(self) -> int:
        """How often the connection broke; messages may have been lost each time."""
        self._watch()
        return self._disconnects

    def failed_handshakes(self) -> int:
        """Since the last connection: the peer answered, but left, or its key is not the expected one."""
        self._watch()
        return self._failed_handshakes

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close()
        super().close()

    def _watch(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._disconnected_at = None
                self._failed_handshakes = 0
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # such as with a peer that has another key
                self._failed_handshakes += 1
            elif event == zmq.EVENT_DISCONNECTED:
                if self._disconnected_at is None:
                    self._disconnected_at = time.monotonic()
                    self._disconnects += 1
            else:
                raise KeyRefused(self.name, f"{self.name}: {self._address} refuses this device's key; enrol "
                                            "the key there, or check that both sides use encryption")


class ZmqHub(Endpoint):
    """D0's end of the control channel: a ROUTER socket, which identifies stages by their instance ids.

    ``peer_keys``: the key that belongs to each routing id; of a message with another key only the key is
    proven, so the message is dropped; an unknown id is answered with a Refusal.
    """

    peer_keys: Mapping[str, bytes] = NO_PEERS
    _key: str = ""  # of the last message's sender

    def send(self, peer: str, message: Message) -> bool:
        """Send a message; False if there is no room, PeerLost if ``peer`` is not connected."""
        try:
            return self._send([peer.encode(), *self._frames(message, peer)], 0.0)
        except zmq.Again:  # a ROUTER looks ready as long as any peer has room
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise PeerLost(f"{self.name}: {peer} is not connected") from None

    def receive(self, timeout: float = 0.0) -> tuple[str, Message] | None:
        frames = self._receive(timeout, MAX_FRAMES + 1)
        if frames is None:
            return None
        peer = frames[0].decode(errors="replace")
        try:
            return peer, decode(frames[1:])
        except ProtocolError as error:
            self.reject(str(error), peer)
        return None

    def _receive(self, timeout: float, most: int) -> list[bytes] | None:
        frames = super()._receive(timeout, most)
        if frames is None or not self.authenticated:
            return frames
        peer = frames[0].decode(errors="replace")
        peer_key = self.peer_keys.get(peer, b"").decode()
        if peer_key != self._key:
            self._drop(f"its sender calls itself {peer[:SHOWN]!r}, but has the key {self._key}")
            if peer not in self.peer_keys:
                with suppress(PeerLost):
                    self.send(peer, Refusal())
            return None
        return frames

    def _receive_first(self, flags: int) -> bytes:
        if not self.authenticated:
            return super()._receive_first(flags)
        frame = self.socket.recv(flags, copy=False)
        self._key = str(frame.get("User-Id"))
        return frame.bytes


class ZmqTransport:
    """One ZeroMQ context; ``keys`` encrypt every link, only ``unencrypted`` permits remote peers without.

    ``peer_keys``: those that a bound end admits (a hub: for each identity), or the bound end's own.
    """

    # The classes of links; an emulation overrides them.
    link_class: type[ZmqLink] = ZmqLink
    client_class: type[ZmqClientLink] = ZmqClientLink
    hub_class: type[ZmqHub] = ZmqHub

    def __init__(self, keys: KeyPair | None = None, tuning: Tuning | None = None,
                 unencrypted: bool = False) -> None:
        self._keys = keys
        self._unencrypted = unencrypted
        self._tuning = tuning or Tuning()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ends: list[Endpoint] = []
        self._key_list: KeyAllowList | None = None

    def pull(self, endpoint: str, name: str, peer_keys: Collection[bytes] = (), fd: int = -1) -> ZmqLink:
        """Bind the receiving end of a data link; ``fd``: a listening socket that is already bound."""
        socket = self._socket(zmq.PULL, self._tuning.data_queue)
        bound = self._bind(socket, endpoint, name, peer_keys, fd)
        return self._keep(self.link_class(bound, name, self._tuning))

    def push(self, endpoint: str, name: str, peer_keys: Collection[bytes] = ()) -> ZmqClientLink:
        socket = self._socket(zmq.PUSH, self._tuning.data_queue)
        socket.immediate = True  # else messages queued in an outage reach the peer's next process
        return self._connect(socket, endpoint, name, peer_keys)

    def hub(self, endpoint: str, name: str, peer_keys: Mapping[str, bytes] = NO_PEERS, fd: int = -1
            ) -> ZmqHub:
        socket = self._socket(zmq.ROUTER, self._tuning.control_queue)
        socket.rcvhwm = 0  # see above
        socket.router_handover = True
        socket.router_mandatory = True
        bound = self._bind(socket, endpoint, name, peer_keys.values(), fd)
        hub = self._keep(self.hub_class(bound, name, self._tuning))
        hub.peer_keys = peer_keys
        return hub

    def control(self, endpoint: str, name: str, identity: str,
                peer_keys: Collection[bytes] = ()) -> ZmqClientLink:
        """Connect a stage's end of the control channel; ``identity`` is its instance id."""
        socket = self._socket(zmq.DEALER, self._tuning.control_queue)
        socket.rcvhwm = 0  # see above
        socket.heartbeat_ivl, socket.heartbeat_timeout = self._tuning.heartbeat_ms, self._tuning.silence_ms
        socket.routing_id = identity.encode()
        return self._connect(socket, endpoint, name, peer_keys)

    def wait(self, incoming: Sequence[Endpoint], outgoing: Sequence[Endpoint], timeout: float) -> None:
        """Sleep until an ``incoming`` has a message, an ``outgoing`` has room, or ``timeout`` s pass."""
        ends = [(end.socket, POLLIN) for end in incoming] + [(end.socket, POLLOUT) for end in outgoing]
        zmq.zmq_poll(ends, max(0, round(timeout * 1e3)))

    def close(self) -> None:
        """Close all links, within the linger time."""
        for end in self._ends:
            end.close()
        if self._key_list is not None:
            self._key_list.stop()
            self._key_list = None
        self._context.destroy()  # unlike term(), also closes a socket that a signal kept from becoming a link

    def _socket(self, kind: int, queue: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(queue)
        socket.linger = self._tuning.linger_ms
        socket.maxmsgsize = self._tuning.max_message_bytes
        socket.tcp_maxrt = self._tuning.silence_ms  # while data is under way
        probe_s = max(1, self._tuning.silence_ms // 5000)  # while none is
        socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, 4
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = probe_s
        return socket

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str, name: str, peer_keys: Collection[bytes],
              fd: int) -> zmq.Socket[bytes]:
        if self._keys is None and not self._unencrypted and (reason := unencrypted_bind_problem(endpoint)):
            socket.close()
            raise UsageError(f"{name}: {reason}")
        # Every socket has its own ZAP domain: its allow-list.  Without keys there is no list, but the domain
        # makes libzmq refuse ZMTP 1.0, for which it takes bytes such as an HTTP request.
        socket.zap_domain = name.encode()
        if self._keys is not None:
            # Without an authenticator CURVE would admit any key.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            if self._key_list is None:
                self._key_list = KeyAllowList(self._context)
                self._key_list.start()
            self._key_list.admit(name, peer_keys)
            socket.curve_secretkey = self._keys.secret
            socket.curve_publickey = self._keys.public
            socket.curve_server = True
        if fd >= 0:
            socket.setsockopt(zmq.USE_FD, fd)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            # The system may permit an address later that is in use or absent now.
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
            raise UsageError(f"{name}: cannot connect to {endpoint}: {error.strerror}") from error
        return link

    def _keep(self, end: E) -> E:
        self._ends.append(end)
        return end
