"""A peer that is busy, or whose kernel is gone, for less and for more than every time limit of a connection.

libzmq ends the process (``!_io_error``) when a heartbeat comes or is due on a connection that broke while
messages waited for a full queue. So each end that may break that way is a process of its own here.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest
from kits import network_beds
from kits.process_clusters import until

from flowspec_edge.errors import PeerLost
from flowspec_edge.lab.links.namespaces import NetnsTestbed
from flowspec_edge.messages import Cancel, Close
from flowspec_edge.transport import keys
from flowspec_edge.transport.keys import KeyPair
from flowspec_edge.transport.zmq_links import Tuning, ZmqClientLink, ZmqTransport

PATIENCE = 60.0  # seconds; only a failing test waits so long
LIMIT_S = 1.0  # of the short tests' connections
USUAL_S = Tuning().silence_ms / 1e3
# Seconds for which an end is busy, in multiples of the limit.
BUSY = (0.5, 0.9, 1.1, 1.6, 2.1)

# Ends that take one message, are busy for so many seconds, and so on; in the end they take all that is left.
# Their process says how many they got, and how often the connecting ones lost their connections.
BUSY_END = """
import sys, time
from pathlib import Path
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import Tuning
from flowspec_edge.transport.zmq_links import ZmqTransport
endpoint, own, peer, limit, life, *busy = sys.argv[1:]
pair = keys.load(Path(own)) if own else None
limit = float(limit)
transport = ZmqTransport(pair, Tuning(heartbeat_ms=round(limit * 200), silence_ms=round(limit * 1e3),
                                      control_queue=8))
public = [peer.encode()] if peer else []
made = {}
for number, seconds in enumerate(map(float, busy)):
    if endpoint == "bound":
        link = transport.pull("tcp://127.0.0.1:*", f"data {number}", public)
        hub = transport.hub("tcp://127.0.0.1:*", f"control {number}", {"v1": public[0]} if public else {})
        print(link.endpoint, hub.endpoint)
        made[link], made[hub] = seconds, seconds
    else:
        made[transport.control(endpoint, f"control {number}", f"v{number}", public)] = seconds
print(flush=True)
got, free_at = dict.fromkeys(made, 0), dict.fromkeys(made, 0.0)
end = time.monotonic() + float(life)
while time.monotonic() < end:
    for link, seconds in made.items():
        if time.monotonic() >= free_at[link] and link.receive() is not None:
            got[link] += 1
            free_at[link] = time.monotonic() + seconds
    time.sleep(0.005)  # a reader that is free: between two looks, as nothing may wait in its place
for link in made:
    while link.receive(0.3) is not None:
        got[link] += 1
print(*got.values(), *(link.disconnects() for link in made if hasattr(link, "disconnects")), flush=True)
transport.close()
"""


@pytest.fixture(params=["plain", "curve"])
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> list[KeyPair]:
    """A server's and a client's, with files; none without encryption."""
    if request.param == "plain":
        return []
    made = [keys.generate(), keys.generate()]
    for place, pair in enumerate(made):
        keys.save(pair, tmp_path / str(place))
    return made


def tuning(limit_s: float) -> Tuning:
    return Tuning(heartbeat_ms=round(limit_s * 200), silence_ms=round(limit_s * 1e3), control_queue=8)


def busy_end(endpoint: str, pairs: Sequence[KeyPair], own: int, directory: Path, limit_s: float,
             life_s: float, busy: Sequence[float]) -> subprocess.Popen[str]:
    own_file, peer = "", ""
    if pairs:
        own_file, peer = str(directory / str(own)), pairs[1 - own].public.decode()
    return subprocess.Popen(
        [sys.executable, "-c", BUSY_END, endpoint, own_file, peer, str(limit_s), str(life_s),
         *map(str, busy)], stdout=subprocess.PIPE, text=True)


def lines(process: subprocess.Popen[str]) -> list[list[str]]:
    assert process.stdout is not None
    return [line.split() for line in iter(process.stdout.readline, "\n")]


def figures(process: subprocess.Popen[str]) -> list[int]:
    """Its last line; the process must have lived to its end."""
    said = process.communicate(timeout=PATIENCE + 60)[0]
    assert process.returncode == 0
    return [int(figure) for figure in said.split()]


@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [LIMIT_S, pytest.param(USUAL_S, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("pairs", "padding"), [
    ("plain", 0), ("curve", 5000),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in (("plain", 5000), ("curve", 0)))
], indirect=["pairs"])
def test_a_bound_end_may_be_busy_for_any_time(pairs: list[KeyPair], tmp_path: Path, limit_s: float,
                                              padding: int) -> None:
    """Links of data and of control, each to a writer that goes on although the queue is full. Small messages
    all arrive, for the kernel has room for them; with large ones the connection may break."""
    busy = [limit_s * factor for factor in BUSY]
    life_s = 3.5 * max(busy)
    reader = busy_end("bound", pairs, 0, tmp_path, limit_s, life_s, busy)
    client = ZmqTransport(pairs[1] if pairs else None, tuning(limit_s))
    public = [pairs[0].public] if pairs else []
    links: list[ZmqClientLink] = []
    for number, (data, control) in enumerate(lines(reader)):
        links.append(client.push(data, f"out {number}", public))
        links.append(client.control(control, f"control {number}", "v1", public))
    sent = [0] * len(links)
    with closing(client):
        end = time.monotonic() + life_s * 0.9
        while time.monotonic() < end:
            for place, link in enumerate(links):
                sent[place] += link.send(Cancel(1, 0, tuple(range(padding + 1))))
            time.sleep(0.02)  # a slow writer, to whom there is always something to send
        broke = [link.disconnects() for link in links]
        received = figures(reader)
    if not padding:
        assert broke == [0] * len(links)
        assert received == sent
    assert min(sent) > 8


@pytest.mark.parametrize("limit_s", [LIMIT_S, pytest.param(USUAL_S, marks=pytest.mark.soak)])
def test_a_connecting_end_may_be_busy_for_any_time(pairs: list[KeyPair], tmp_path: Path, limit_s: float
                                                   ) -> None:
    busy = [limit_s * factor for factor in BUSY]
    life_s = 3.5 * max(busy)
    names = [f"v{number}" for number in range(len(busy))]
    with closing(ZmqTransport(pairs[0] if pairs else None, tuning(limit_s))) as server:
        hub = server.hub("tcp://127.0.0.1:*", "D0 control",
                         dict.fromkeys(names, pairs[1].public) if pairs else {})
        reader = busy_end(hub.endpoint, pairs, 1, tmp_path, limit_s, life_s, busy)
        assert lines(reader) == []
        sent, end = dict.fromkeys(names, 0), time.monotonic() + life_s * 0.9
        while time.monotonic() < end:
            for name in names:
                with suppress(PeerLost):  # not connected yet
                    sent[name] += hub.send(name, Close(sent[name]))
            time.sleep(0.02)  # as above
        *received, = figures(reader)
    assert received == [*sent.values(), *[0] * len(busy)]
    assert min(sent.values()) > 8


@pytest.mark.parametrize("limit_s", [1.0, 5.0])
def test_the_kernel_watches_both_ends_of_every_connection(pairs: list[KeyPair], limit_s: float) -> None:
    server, client = (ZmqTransport(pairs[place] if pairs else None, tuning(limit_s)) for place in (0, 1))
    with closing(server), closing(client):
        pull = server.pull("tcp://127.0.0.1:*", "in", [pairs[1].public] if pairs else ())
        push = client.push(pull.endpoint, "out", [pairs[0].public] if pairs else ())
        until(lambda: not push.disconnected_for())
        port, watched = int(pull.endpoint.rpartition(":")[2]), 0
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError), socket.socket(fileno=socket.dup(int(entry.name))) as end:
                if end.family != socket.AF_INET or port not in (end.getsockname()[1], end.getpeername()[1]):
                    continue
                watched += 1
                idle, between, count = (end.getsockopt(socket.IPPROTO_TCP, option) for option in (
                    socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT))
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert idle + between * count == 5
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == limit_s * 1e3
        assert watched == 2


@network_beds.needs_netns
@pytest.mark.slow
@pytest.mark.parametrize("writes", [False, True], ids=["idle", "data under way"])
def test_a_peer_whose_cable_is_out_is_noticed_and_found_again(writes: bool) -> None:
    with NetnsTestbed(1) as bed:
        def plug(state: str) -> None:
            subprocess.run(bed.command(1, ["ip", "link", "set", bed.interface(1), state]), check=True)

        with bed.entered(0):
            server = ZmqTransport(unencrypted=True)
            hub = server.hub(f"tcp://{bed.address(0)}:*", "D0 control")
        with bed.entered(1):
            client = ZmqTransport(unencrypted=True)
            link = client.control(hub.endpoint, "V1 control", "v1")
        with closing(server), closing(client):
            until(lambda: not link.disconnected_for())
            plug("down")
            if writes:
                link.send(Close(1))
            until(lambda: link.disconnected_for() > 0)
            plug("up")
            until(lambda: not link.disconnected_for())
            assert link.send(Close(2))
            until(lambda: hub.receive() == ("v1", Close(2)))
