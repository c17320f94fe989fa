"""Measuring a link: both ends over loopback, and every way the other end can be wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from flowspec_edge.boards.links import linktest
from flowspec_edge.boards.links.linktest import measure_link, round_trips, serve_link
from flowspec_edge.errors import FlowspecError, UsageError

HOST = "127.0.0.1"


@contextmanager
def peer(measurements: int) -> Iterator[int]:
    """A serving thread's port."""
    found: list[int] = []
    listens = threading.Event()
    thread = threading.Thread(target=serve_link, args=(HOST, 0, 60, measurements),
                              kwargs={"ready": lambda port: (found.append(port), listens.set())})
    thread.start()
    assert listens.wait(60)
    yield found[0]
    thread.join(60)
    assert not thread.is_alive()


def test_two_measurements_and_pings_between() -> None:
    with peer(2) as port:
        first = measure_link(HOST, port, 0.2)
        trips = round_trips(HOST, port, 7)
        second = measure_link(HOST, port, 0.2)
    assert len(trips) == 7
    for measured in (first, second):
        assert measured.mbps > 10
        assert 0 < measured.latency_ms < 1000


def test_the_command_that_is_run_over_ssh() -> None:
    command = [sys.executable, "-m", "flowspec_edge.boards.links.linktest"]
    with subprocess.Popen([*command, "serve", HOST, "0", "--measurements", "1", "--seconds", "60"],
                          stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        done = subprocess.run([*command, "measure", HOST, str(port), "--seconds", "0.2"],
                              capture_output=True, text=True, check=True)
        assert json.loads(done.stdout).keys() == {"latency_ms", "mbps"}
        assert server.wait(60) == 0
    failed = subprocess.run([*command, "measure", HOST, str(port)], capture_output=True, text=True,
                            check=False)
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert f"{HOST}:{port} cannot be reached: nothing listens there" in failed.stderr


def test_it_ends_when_its_time_is_over() -> None:
    serve_link(HOST, 0, seconds=0.05)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(FlowspecError, match=r"host\.invalid:7000 cannot be reached.*flowspec device peer"):
        measure_link("no-such-host.invalid", 7000)


def test_something_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "_CONNECT_S", 0.3)
    with socket.create_server((HOST, 0)) as server, pytest.raises(FlowspecError, match="as a flowspec peer"):
        measure_link(HOST, server.getsockname()[1])


def test_a_zeromq_peer_of_another_kind() -> None:
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port(f"tcp://{HOST}")

        def echo_wrongly() -> None:
            name, _ = router.recv_multipart()
            router.send_multipart([name, b"something else"])

        thread = threading.Thread(target=echo_wrongly)
        thread.start()
        with pytest.raises(FlowspecError, match="not answer as a flowspec"):
            measure_link(HOST, port)
        thread.join(10)
    context.term()


def test_foreign_messages_do_not_disturb_the_peer() -> None:
    context = zmq.Context()
    with peer(1) as port, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{HOST}:{port}")
        for frames in ([b"ping", b"x"], [b"data"], [b""], [b"flowspec-link/1", b"x"], [b"done"]):
            stranger.send_multipart(frames)  # without a greeting
        stranger.send(b"flowspec-link/1")
        assert stranger.recv() == b"flowspec-link/1"  # the first answer: to none before it
        assert measure_link(HOST, port, 0.1).mbps > 0
    context.term()


def test_more_clients_than_the_peer_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "_MAX_FLOWS", 3)
    context = zmq.Context()
    with peer(1) as port:
        strangers = [context.socket(zmq.DEALER) for _ in range(4)]
        for stranger in strangers:
            stranger.linger = 0
            stranger.connect(f"tcp://{HOST}:{port}")
            stranger.send(b"flowspec-link/1")
            assert stranger.recv() == b"flowspec-link/1"
        strangers[0].send(b"ping")  # forgotten
        strangers[1].send(b"ping")
        assert strangers[1].recv() == b"ping"
        assert not strangers[0].poll(0)
        assert measure_link(HOST, port, 0.1).mbps > 0
    context.destroy()


def test_the_port_is_taken() -> None:
    with socket.create_server((HOST, 0)) as server, pytest.raises(UsageError, match="cannot listen"):
        serve_link(HOST, server.getsockname()[1], 1)


@pytest.mark.parametrize("seconds", [0, -1, 31, float("nan")])
def test_times_out_of_range(seconds: float) -> None:
    with pytest.raises(UsageError, match="up to 30 s"):
        measure_link(HOST, 1, seconds)
