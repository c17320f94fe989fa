"""A file from one board to its neighbour, without any trust between the two but for this once.

Knows ZeroMQ and CURVE: either end has a key pair that was made for this transfer, and the control host
has told each the other's public key.  Nobody else gets a byte in or out.  Does not know what the file is;
its sha256 is checked by whoever stores it.  Runs on the boards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from flowspec_edge.errors import FlowspecError
from flowspec_edge.transport.keys import KeyPair

_PIECE = 256 * 1024
_QUEUE = 8  # pieces under way at each end
_SILENCE_MS = 15_000  # after which an end gives up
_DOMAIN = "shipping"


def serve(path: Path, offset: int, address: str, own: KeyPair, neighbour: bytes,
          ready: Callable[[], None]) -> None:
    """Give the file from ``offset`` on to the one who has the secret key of ``neighbour``, once.

    ready  called as soon as it listens at ``address``

    FlowspecError if it cannot listen there, or nobody comes for it, or the neighbour stops taking.
    """
    with path.open("rb") as file, zmq.Context() as context:
        file.seek(offset)
        left = os.fstat(file.fileno()).st_size - offset
        gate = ThreadAuthenticator(context)
        gate.start()
        try:
            gate.configure_curve_callback(_DOMAIN, _Only(neighbour))
            with context.socket(zmq.PUSH) as socket:
                _prepare(socket, own)
                socket.immediate = True  # nothing is queued for somebody who is not let in
                socket.zap_domain = _DOMAIN.encode()
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
                socket.curve_server = True
                try:
                    socket.bind(address)
                except zmq.ZMQError as error:
                    raise FlowspecError(f"cannot listen on {address}: {error.strerror}") from error
                ready()
                while left:
                    piece = file.read(min(_PIECE, left))
                    if not piece:
                        raise FlowspecError(f"{path} has become shorter")
                    socket.send(piece)
                    left -= len(piece)
        except zmq.Again:
            raise FlowspecError(f"nobody has fetched {path} for {_SILENCE_MS // 1000} s") from None
        finally:
            gate.stop()


def fetch(address: str, own: KeyPair, neighbour: bytes, size: int) -> Iterator[bytes]:
    """The ``size`` bytes that the neighbour with the key ``neighbour`` serves at ``address``, in pieces.

    FlowspecError if they do not come.
    """
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        _prepare(socket, own)
        socket.curve_serverkey = neighbour
        socket.connect(address)
        while size:
            try:
                piece = socket.recv()
            except zmq.Again:
                raise FlowspecError(f"nothing has come from {address} for {_SILENCE_MS // 1000} s") from None
            if len(piece) > size:
                raise FlowspecError(f"more has come from {address} than the file has")
            size -= len(piece)
            yield piece


class _Only:
    """Lets one key in; in the form that pyzmq's authenticator asks for."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def _prepare(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    socket.set_hwm(_QUEUE)
    socket.maxmsgsize = 2 * _PIECE  # encrypted a message is some bytes longer
    socket.sndtimeo = socket.rcvtimeo = socket.linger = _SILENCE_MS
    socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
