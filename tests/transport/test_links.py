"""What links promise, over real sockets (plain and CURVE) and in the memory of a test."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
import zmq
from kits.memory_links import MemoryTransport

from flowspec_edge.errors import FlowspecError, PeerFault, PeerLost
from flowspec_edge.messages import Cancel, Close, Credit, Failed, Hello, Message, Output, Payload
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import Endpoint, Tuning, ZmqClientLink, ZmqHub, ZmqLink, ZmqTransport

PATIENCE = 20.0  # seconds; only a failing test waits so long
SERVER, CLIENT, STRANGER = keys.generate(), keys.generate(), keys.generate()


@dataclass
class Network:
    """Two devices: one binds, one connects."""

    server: ZmqTransport
    client: ZmqTransport
    endpoints: Iterator[str]
    to_server: list[bytes] = field(default_factory=list)
    to_client: list[bytes] = field(default_factory=list)

    def data(self) -> tuple[ZmqLink, ZmqClientLink]:
        receiver = self.server.pull(next(self.endpoints), "data in", self.to_client)
        return receiver, self.client.push(where(receiver), "data out", self.to_server)

    def control(self, *identities: str) -> tuple[ZmqHub, list[ZmqClientLink]]:
        keys_of = dict.fromkeys(identities, self.to_client[0]) if self.to_client else {}
        hub = self.server.hub(next(self.endpoints), "D0 control", keys_of)
        return hub, [self.client.control(where(hub), f"{name} control", name, self.to_server)
                     for name in identities]


def where(end: Endpoint) -> str:
    """The address of a bound end: what the system chose, or in memory the only one there is."""
    return str(getattr(end, "endpoint", "memory:0"))


@pytest.fixture(params=["zmq", "curve", "memory"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    tuning = Tuning(data_queue=2, linger_ms=200)
    match request.param:
        case "memory":
            both = MemoryTransport(data_queue=2)
            made = Network(both, both, itertools.repeat("memory:0"))
        case "zmq":
            made = Network(ZmqTransport(tuning=tuning), ZmqTransport(tuning=tuning),
                           itertools.repeat("tcp://127.0.0.1:*"))
        case _:
            made = Network(ZmqTransport(SERVER, tuning), ZmqTransport(CLIENT, tuning),
                           itertools.repeat("tcp://127.0.0.1:*"), [SERVER.public], [CLIENT.public])
    yield made
    made.client.close()
    made.server.close()


def output(rows: int = 3, width: int = 5) -> Output:
    hidden = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    return Output(1, 0, 4, np.arange(rows, dtype=np.int32), Payload("float32", hidden))


def until(link: ZmqClientLink, condition: Callable[[], bool]) -> None:
    """Look again whenever the link's monitor has an event: nothing else can change the answer."""
    while not condition():
        assert link._monitor.poll(PATIENCE * 1e3), "it never came true"


def received(link: ZmqLink) -> Message:
    message = link.receive(PATIENCE)
    assert message is not None
    return message


def test_messages_arrive_whole_in_order_and_counted(network: Network) -> None:
    receiver, sender = network.data()
    for run in range(2):
        assert sender.send(Credit(1, 0, run), PATIENCE)
    assert [received(receiver), received(receiver)] == [Credit(1, 0, 0), Credit(1, 0, 1)]
    large = output(256, 1024)  # above the size that is sent without a copy
    assert sender.send(large, PATIENCE)
    got = received(receiver)
    assert isinstance(got, Output)
    np.testing.assert_array_equal(got.hidden.array, large.hidden.array)
    assert not got.hidden.array.flags.writeable
    assert receiver.bytes_in == sender.bytes_out > large.hidden.array.nbytes


def test_a_full_link_says_so_and_loses_nothing(network: Network) -> None:
    receiver, sender = network.data()
    big = output(512, 2048)  # 4 MB: the kernel's buffers cannot hide many
    sent = 0
    while sender.send(big, 0.5):
        sent += 1
        assert sent < 50, "the link takes messages without bound"
    for _ in range(sent):
        received(receiver)
    assert receiver.receive(0.05) is None
    assert sender.send(big, PATIENCE)
    received(receiver)


def test_nothing_is_taken_for_a_peer_that_is_not_there() -> None:
    transport = ZmqTransport(tuning=Tuning(linger_ms=0))
    link = transport.push("tcp://127.0.0.1:1", "out")
    assert not link.send(Close(1), 0.05)
    assert link.disconnected_for() > 0
    transport.close()


def test_wait_returns_for_a_message_and_for_room(network: Network) -> None:
    receiver, sender = network.data()
    assert sender.send(Close(1), PATIENCE)
    start = time.monotonic()
    network.server.wait([receiver], [], PATIENCE)
    assert received(receiver) == Close(1)
    network.client.wait([], [sender], PATIENCE)
    assert sender.send(Close(2))
    assert time.monotonic() - start < PATIENCE
    assert received(receiver) == Close(2)
    network.server.wait([receiver], [], 0.01)  # nothing: the timeout ends it


def test_the_hub_tells_its_peers_apart(network: Network) -> None:
    hub, (v1, v2) = network.control("v1-a", "v2-a")
    assert v2.send(Failed("v2-a", 2, "no memory"), PATIENCE)
    assert v1.send(Hello("v1-a", 1, 2, (0, 2), "d"), PATIENCE)
    came = dict(item for item in (hub.receive(PATIENCE), hub.receive(PATIENCE)) if item)
    assert came["v2-a"] == Failed("v2-a", 2, "no memory")
    assert came["v1-a"] == Hello("v1-a", 1, 2, (0, 2), "d")
    assert hub.send("v2-a", Cancel(1, 0, (7,)))
    assert received(v2) == Cancel(1, 0, (7,))
    assert v1.receive() is None
    with pytest.raises(PeerLost, match="v9 is not connected"):
        hub.send("v9", Close(1))


def test_a_connection_that_breaks_is_noticed(network: Network) -> None:
    receiver, sender = network.data()
    assert sender.send(Close(1), PATIENCE)
    received(receiver)
    until(sender, lambda: sender.disconnected_for() == 0.0)
    assert sender.disconnects() == 0
    receiver.close()
    until(sender, lambda: sender.disconnected_for() > 0.0)
    assert sender.disconnects() == 1


def test_an_address_that_is_taken_is_an_error(network: Network) -> None:
    receiver, _ = network.data()
    with pytest.raises(FlowspecError, match="cannot listen on"):
        network.server.pull(where(receiver), "again", network.to_client)


# ---- what only sockets can do ------------------------------------------------------------------


@pytest.fixture
def plain() -> Iterator[ZmqTransport]:
    transport = ZmqTransport(tuning=Tuning(linger_ms=0))
    yield transport
    transport.close()


WRONG = [[b"GET / HTTP/1.1", b"", b"x", b"y", b"z"], [b""], [b"\x93\x01"]]


def test_wrong_bytes_without_a_key_are_dropped(plain: ZmqTransport, caplog: pytest.LogCaptureFixture) -> None:
    link, hub = plain.pull("tcp://127.0.0.1:*", "V2 data in"), plain.hub("tcp://127.0.0.1:*", "D0 control")
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.DEALER) as dealer:
        push.connect(link.endpoint)
        dealer.routing_id = b"scanner"
        dealer.connect(hub.endpoint)
        for frames in WRONG:
            push.send_multipart(frames)
            dealer.send_multipart(frames)
            assert link.receive(PATIENCE) is None
            assert hub.receive(PATIENCE) is None
    assert (link.dropped, hub.dropped) == (3, 3)
    assert [message.partition(": the")[0] for message in caplog.messages] == [
        "V2 data in: dropped a message, number 1", "D0 control: dropped a message, number 1: from 'scanner'"]
    ours = plain.push(link.endpoint, "data out")
    assert ours.send(Close(1), PATIENCE)
    assert link.receive(PATIENCE) == Close(1)


def test_wrong_bytes_from_a_peer_with_a_key_are_its_fault() -> None:
    server = ZmqTransport(SERVER, Tuning(linger_ms=0))
    link = server.pull("tcp://127.0.0.1:*", "V2 data in", [CLIENT.public])
    hub = server.hub("tcp://127.0.0.1:*", "D0 control", {"v1": CLIENT.public})
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.DEALER) as dealer:
        dealer.routing_id = b"v1"
        for socket, end in ((push, link), (dealer, hub)):
            socket.curve_serverkey = SERVER.public
            socket.curve_secretkey, socket.curve_publickey = CLIENT.secret, CLIENT.public
            socket.connect(end.endpoint)
        for frames in WRONG:
            push.send_multipart(frames)
            dealer.send_multipart(frames)
            with pytest.raises(PeerFault, match=r"^V2 data in: "):
                link.receive(PATIENCE)
            with pytest.raises(PeerFault, match=r"^D0 control: from 'v1': ") as caught:
                hub.receive(PATIENCE)
            assert caught.value.peer == "v1"
    server.close()


@pytest.mark.parametrize("sent", [
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x03\x00ab\x03\x00cd",  # ZMTP 1.0: two messages
    bytes(range(1, 200)), b"\x01\x00" * 50])
def test_bytes_that_do_not_speak_zmtp_3_never_become_messages(plain: ZmqTransport, sent: bytes) -> None:
    """libzmq reads any bytes that do not begin with 0xff as ZMTP 1.0, and passes on what it finds there."""
    ends = [plain.pull("tcp://127.0.0.1:*", "V2 data in"), plain.hub("tcp://127.0.0.1:*", "D0 control")]
    for end in ends:
        with socket.create_connection(("127.0.0.1", int(end.endpoint.rpartition(":")[2]))) as raw:
            raw.settimeout(PATIENCE)
            with suppress(OSError):
                raw.sendall(sent)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        assert end.receive() is None
        assert end.dropped == 0


LEAVING = """
import time, zmq
from flowspec_edge.transport.zmq_links import ZmqTransport
transport = ZmqTransport()
ends = [transport.pull("tcp://127.0.0.1:*", "data in"), transport.hub("tcp://127.0.0.1:*", "D0 control")]
with zmq.Context() as context:
    for kind, end in zip((zmq.PUSH, zmq.DEALER), ends):
        with context.socket(kind) as peer:
            peer.linger = 0
            peer.connect(end.endpoint)
            for _ in range(3000):  # more than the queue for data holds
                if not peer.poll(500, zmq.POLLOUT):
                    break
                peer.send(bytes(10_000))
time.sleep(1)  # longer than any heartbeat's interval
for end in ends:
    end.receive()
    assert end.dropped == 1
transport.close()
"""


def test_a_peer_that_leaves_while_its_messages_wait() -> None:
    subprocess.run([sys.executable, "-c", LEAVING], timeout=PATIENCE * 3, check=True)


def test_no_key_holder_can_take_anothers_identity(caplog: pytest.LogCaptureFixture) -> None:
    other = keys.generate()
    server, v1, v2 = (ZmqTransport(pair, Tuning(linger_ms=0)) for pair in (SERVER, CLIENT, other))
    hub = server.hub("tcp://127.0.0.1:*", "D0 control", {"v1": CLIENT.public, "v2": other.public})
    honest = v1.control(hub.endpoint, "V1 control", "v1", [SERVER.public])
    assert honest.send(Credit(1, 0, 0), PATIENCE)
    assert hub.receive(PATIENCE) == ("v1", Credit(1, 0, 0))
    for identity in ("v1", "v3"):
        false = v2.control(hub.endpoint, "V2 control", identity, [SERVER.public])
        for run in range(3):
            assert false.send(Credit(1, 0, run), PATIENCE)
            assert hub.receive(PATIENCE) is None
        false.close()
    assert hub.dropped == 6
    assert caplog.messages == ["D0 control: dropped a message, number 1: its sender calls itself 'v1', but "
                               f"has the key {other.public.decode()}"]
    own = v2.control(hub.endpoint, "V2 control", "v2", [SERVER.public])
    assert own.send(Credit(1, 0, 7), PATIENCE)
    assert hub.receive(PATIENCE) == ("v2", Credit(1, 0, 7))
    for transport in (v1, v2, server):
        transport.close()


def test_a_restarted_peer_takes_over_its_identity(plain: ZmqTransport) -> None:
    hub = plain.hub("tcp://127.0.0.1:*", "D0 control")
    for life in range(2):  # the first one is not closed: it vanished
        link = plain.control(hub.endpoint, f"life {life}", "v1")
        assert link.send(Credit(1, 0, life), PATIENCE)
        assert hub.receive(PATIENCE) == ("v1", Credit(1, 0, life))
    assert hub.send("v1", Close(5))
    assert link.receive(PATIENCE) == Close(5)


@pytest.mark.parametrize("pair", [STRANGER, None])
def test_a_key_that_is_not_on_the_list_is_refused_and_told(pair: keys.KeyPair | None,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    server = ZmqTransport(SERVER, Tuning(linger_ms=0))
    client = ZmqTransport(pair, Tuning(linger_ms=0))
    receiver = server.pull("tcp://127.0.0.1:*", "data in", [CLIENT.public])
    if pair:  # each socket has a list of its own
        server.pull("tcp://127.0.0.1:*", "other data in", [pair.public])
    sender = client.push(receiver.endpoint, "V1 data out", [SERVER.public] if pair else [])

    with pytest.raises(FlowspecError, match=r"V1 data out: .* refuses this device's key"):
        until(sender, lambda: sender.disconnected_for() < 0)
    assert not sender.send(Close(1))
    assert receiver.receive() is None
    client.close()
    server.close()
    assert caplog.messages == ([f"data in: 127.0.0.1 is refused: its key {pair.public.decode()} is not on "
                                "the list"] if pair else [])


def test_a_stranger_who_tries_again_and_again_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    server = ZmqTransport(SERVER, Tuning(linger_ms=0))
    receivers = [server.pull("tcp://127.0.0.1:*", name, [CLIENT.public]) for name in ("one", "other")]
    for receiver in (*receivers, *receivers):
        client = ZmqTransport(keys.generate(), Tuning(linger_ms=0))
        sender = client.push(receiver.endpoint, "V1 data out", [SERVER.public])
        with pytest.raises(FlowspecError, match="refuses this device's key"):
            until(sender, lambda link=sender: link.disconnected_for() < 0)
        client.close()
    server.close()
    assert [message.split(":")[0] for message in caplog.messages] == ["one", "other"]


def test_a_message_that_is_too_long_is_not_taken_in() -> None:
    """Its sender is disconnected before it is in memory; others are served."""
    receiving = ZmqTransport(tuning=Tuning(linger_ms=0, max_message_bytes=10_000))
    receiver = receiving.pull("tcp://127.0.0.1:*", "data in")
    context = zmq.Context()
    wrong = context.socket(zmq.PUSH)
    wrong.linger = 0
    gone = wrong.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    wrong.connect(receiver.endpoint)
    wrong.send(bytes(10_001))
    assert gone.poll(PATIENCE * 1e3)
    assert receiver.receive() is None
    sender = receiving.push(receiver.endpoint, "data out")
    assert sender.send(Close(1), PATIENCE)
    assert receiver.receive(PATIENCE) == Close(1)
    wrong.disable_monitor()
    gone.close()
    wrong.close()
    context.term()
    receiving.close()


def test_a_false_server_gets_nothing() -> None:
    server, client = ZmqTransport(STRANGER, Tuning(linger_ms=0)), ZmqTransport(CLIENT, Tuning(linger_ms=0))
    receiver = server.pull("tcp://127.0.0.1:*", "data in", [CLIENT.public])
    sender = client.push(receiver.endpoint, "out", [SERVER.public])
    assert not sender.send(Close(1), 0.5)
    assert receiver.receive() is None
    client.close()
    server.close()


def test_a_half_made_link_lets_its_transport_close() -> None:
    """As by a signal; its socket is there then, and in no link."""
    class Interrupted(ZmqClientLink):
        def __init__(self, *_: object) -> None:
            raise KeyboardInterrupt

    transport = ZmqTransport(tuning=Tuning(linger_ms=0))
    transport.client_class = Interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        transport.push("tcp://127.0.0.1:1", "out")
    closing = threading.Thread(target=transport.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert caught.traceback  # which holds the socket, as that of a signal's exception does
