"""A stage may leave before its first Hello, because systemd starts it again; and it may connect late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import msgpack
import pytest
from kits.process_clusters import PATIENCE
from kits.services import free_port, own_address
from kits.worker_thread import segment

from flowspec_edge.d0.core import DraftCore
from flowspec_edge.d0.events import Action, Send, Wait
from flowspec_edge.d0.observer import Observer
from flowspec_edge.drivers.observe.power import SessionEnergy
from flowspec_edge.drivers.processes.addresses import Loopback
from flowspec_edge.drivers.processes.event_loop import EventLoop
from flowspec_edge.drivers.processes.membership import Membership
from flowspec_edge.drivers.processes.stage_links import StageLinks
from flowspec_edge.drivers.processes.timing import ClusterTiming
from flowspec_edge.drivers.ring import Addresses
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import PROTOCOL_VERSION, Hello, Segment
from flowspec_edge.transport.zmq_links import Tuning, ZmqTransport


@contextmanager
def two_transports() -> Iterator[tuple[ZmqTransport, ZmqTransport]]:
    """D0's and V1's."""
    transports = ZmqTransport(tuning=Tuning(linger_ms=0)), ZmqTransport(tuning=Tuning(linger_ms=0))
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()


def links_to(d0: ZmqTransport, first: str) -> StageLinks:
    """D0's links, to a V1 that receives segments at ``first``."""
    return StageLinks(d0, Addresses("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", first, ["v1"]),
                      Loopback(), Membership(["v1"], PATIENCE, fail_on_rejoin=True), lambda seconds: None,
                      lambda heartbeat, at: None, lambda session: False, lambda session, size: None)


def test_v1_may_leave_before_its_hello() -> None:
    """As one of another release does: its data link breaks, with nothing on it."""
    with two_transports() as (d0, v1):
        gone = v1.pull("tcp://127.0.0.1:*", "V1 data in")
        gone_at = gone.endpoint
        links = links_to(d0, gone_at)
        left: list[bool] = []

        def waiting(stages: list[str]) -> None:
            assert stages == ["V1"]
            if not left and links.reaches_v1:
                gone.close()
                left.append(True)
            elif left == [True] and not links.reaches_v1:
                left.append(True)
                v1.pull(gone_at, "V1 data in")
                assert v1.control(links.control_endpoint, "V1 control", "v1").send(
                    Hello("v1", 1, 1, (0, 2), "digest"), PATIENCE)

        links.wait_for_hello(PATIENCE, waiting)
        assert left == [True, True]


def test_a_stage_of_an_older_protocol_is_named_with_what_to_do() -> None:
    """By the very frame that a release of protocol version 8 sends, which has one field fewer."""
    with two_transports() as (d0, v1):
        links = links_to(d0, v1.pull("tcp://127.0.0.1:*", "V1 data in").endpoint)
        control = v1.control(links.control_endpoint, "V1 control", "v1")
        control.socket.send(msgpack.packb(["Hello", "", [], b"", "v1", 1, 1, [0, 2], "digest", 8, -1]))
        with pytest.raises(ProtocolError, match=(
                rf"^V1 speaks protocol version 8, D0 {PROTOCOL_VERSION}: install the same release on all devices, "
                r"on boards with: flowspec deploy up$")):
            links.wait_for_hello(PATIENCE, lambda stages: None)


class OnePrompt:
    """A core that sends one segment, and then waits for its output."""

    sessions = closing = ()
    is_decoding = True

    def __init__(self) -> None:
        self._actions: list[Action] = [Send([segment(0, rows=4)])]

    def next(self) -> Action:
        return self._actions.pop() if self._actions else Wait()

    def feed(self, event: object) -> None:
        raise AssertionError(f"V1 sent {event}")


def test_what_v1_had_no_room_for_leaves_when_it_has() -> None:
    """V1 says Hello over one connection and takes segments over another, which may be there later. The core
    sends no more before it has an output."""
    with two_transports() as (d0, v1):
        host = own_address()
        address = f"tcp://{host}:{free_port(host)}"  # where V1 does not listen yet
        links = links_to(d0, address)
        loop = EventLoop(cast(DraftCore, OnePrompt()), links, None, Observer(), SessionEnergy(None),
                         ClusterTiming(None, 1, lambda kind: 0.0))
        links.expect_from_now()
        loop.step(0.0)
        assert not links.reaches_v1
        there = v1.pull(address, "V1 data in")
        deadline = time.monotonic() + PATIENCE
        while (arrived := there.receive()) is None and time.monotonic() < deadline:
            loop.step(0.01)
        assert isinstance(arrived, Segment)
        assert arrived.numbers.tolist() == [0, 1, 2, 3]
