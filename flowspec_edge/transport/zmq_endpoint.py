"""One ZeroMQ socket: frames in and out, counted; what is rejected."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import zmq

from flowspec_edge.errors import PeerFault
from flowspec_edge.messages import Message
from flowspec_edge.transport.codec import encode
from flowspec_edge.transport.fields import Buffer

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
    """``authenticated``: CURVE has checked the peers' keys; ``dropped``: messages from peers without keys."""

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
        """With the port that the system chose."""
        return cast(bytes, self.socket.last_endpoint).decode().rstrip("\0")

    def close(self) -> None:
        self.socket.close()

    def reject(self, reason: str, peer: str = "") -> None:
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
        """Subclasses may add to it; ``peer``: a hub's receiver."""
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
        left, size = len(frames), 0
        for frame in frames:
            left -= 1
            length = len(frame)
            size += length
            self.socket.send(frame, _MORE if left else NOBLOCK, length < self._zero_copy)
        self.bytes_out += size

    def _receive(self, timeout: float, most: int) -> list[bytes] | None:
        """One multipart message, or None; of the frames beyond ``most`` one is kept, as evidence.  pyzmq
        copies frames into aligned bytes: up to about 300 KB cheaper than its zero-copy Frame."""
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
