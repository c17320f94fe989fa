"""Measuring a link over plain TCP: by the system's own Python, as boards do it, and every way it can fail."""

from __future__ import annotations

import inspect
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowspec_edge.boards.links import tcp_linktest

HOST = "127.0.0.1"
PYTHON = [shutil.which("python3", path="/usr/bin:/bin") or sys.executable, "-s", "-"]
PROGRAM = inspect.getsource(tcp_linktest)


def measured(port: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PYTHON, "measure", HOST, str(port), "--seconds", "0.1"], input=PROGRAM, text=True,
                          capture_output=True, check=False)


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A port where another program answers and hangs up."""
    with socket.create_server((HOST, 0)) as server:
        def speak() -> None:
            link, _ = server.accept()
            with link:
                link.recv(tcp_linktest.PING_BYTES)
                link.sendall(answer)

        thread = threading.Thread(target=speak)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)
        assert not thread.is_alive()


def test_two_processes() -> None:
    with subprocess.Popen([*PYTHON, "serve", HOST, "0", "--seconds", "30"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(PROGRAM)
        server.stdin.close()
        port = json.loads(server.stdout.readline())["port"]
        done = measured(port)
        assert server.wait(60) == 0
    found = json.loads(done.stdout)
    assert found["mbps"] > 10
    assert 0 < found["latency_ms"] < 1000
    again = measured(port)
    assert (again.returncode, again.stderr) == (1, f"{HOST}:{port}: Connection refused\n")


def test_another_program_answers() -> None:
    with answering(b"x" * 10) as port:
        done = measured(port)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"{HOST}:{port}: ")


def test_no_client_connects() -> None:
    with pytest.raises(TimeoutError):
        tcp_linktest.serve(HOST, 0, 0.01)
