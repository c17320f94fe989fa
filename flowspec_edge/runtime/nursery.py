"""A process that has imported what workers need, and forks into one whenever it is asked.

A worker of its own spends seconds on importing torch and transformers, and every one of a local
cluster does so at once; a forked one begins with all that in its memory, shared with the others.
Knows processes, how they are asked for and how their ends are told.  Does not know what workers do.

The asking process and the nursery share a socket.  A request is a JSON object with the path of a
worker's configuration and that of its output, and at most one file descriptor, the worker's
listening socket; the answer has the process id.  Later a line tells each worker's exit code.  When
the asking process is gone the socket ends, and so does the nursery; its workers see that their
parent has gone.

    python -m flowspec_edge.runtime.nursery FD
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import flowspec_edge
from flowspec_edge.errors import FlowspecError
from flowspec_edge.runtime.waiting import readable

_MOST_BYTES = 65536
_UNKNOWN = 1  # exit code of a worker that the nursery can tell nothing of any more
_TOLD_S = 5.0  # how much later than its end a worker's exit code may be told

Answer = dict[str, Any]


class Nursling:
    """A forked worker; as much of a ``subprocess.Popen`` as its starter uses."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._end = os.pidfd_open(pid)  # the nursery reaps it only after its next look
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._code is None and readable([self._end], 0):
            self._code = self._nursery.code(self.pid)
            os.close(self._end)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended; subprocess.TimeoutExpired if that takes too long."""
        if self._code is None:
            readable([self._end], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._end, number)


class Nursery:
    """The asking side."""

    def __init__(self) -> None:
        """Start the process; it imports while we go on."""
        self.environment = dict(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(flowspec_edge.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flowspec_edge.runtime.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for D0
                env={**os.environ, "PYTHONPATH": path})
        self._socket = ours
        self._codes: dict[int, int] = {}
        self._running: set[int] = set()
        self._in_step = True  # no answer is under way that nobody will read
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """Whether it lives, and still has the environment that a child of ours would have."""
        return self._in_step and self._process.poll() is None and self.environment == dict(os.environ)

    @property
    def idle(self) -> bool:
        """Whether no worker of it runs."""
        return not self._running

    def start(self, config: Path, output: Path, fd: int = -1, verbose: bool = False) -> Nursling:
        """A worker with this configuration, whose stdout and stderr go to ``output``."""
        request = json.dumps({"config": str(config), "output": str(output), "verbose": verbose})
        self._in_step = False
        try:
            socket.send_fds(self._socket, [request.encode()], [fd] if fd >= 0 else [])
            while "pid" not in (answer := self._answer(None)):
                self._codes[answer["ended"]] = answer["code"]
        except OSError as error:
            raise FlowspecError(f"the process that starts workers is gone: {error}") from error
        self._in_step = True
        self._running.add(answer["pid"])
        return Nursling(self, answer["pid"])

    def code(self, pid: int) -> int:
        """The exit code of a worker that has ended."""
        self._running.discard(pid)
        try:
            while pid not in self._codes:
                answer = self._answer(_TOLD_S)
                self._codes[answer["ended"]] = answer["code"]
        except OSError:
            return _UNKNOWN
        return self._codes.pop(pid)

    def close(self) -> None:
        """End the process, which may still be importing; workers that are left end, too."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.terminate()
        self._process.wait()

    def _answer(self, timeout: float | None) -> Answer:
        if not readable([self._socket.fileno()], timeout):
            raise TimeoutError("no word")
        data = self._socket.recv(_MOST_BYTES)
        if not data:
            raise ConnectionResetError("it has ended")
        return dict(json.loads(data))


_nursery: Nursery | None = None


def nursery() -> Nursery:
    """This process' own, started when it is first wanted; another one if the environment has changed."""
    global _nursery
    if _nursery is None or not _nursery.usable:
        if _nursery is not None and _nursery.idle:
            _nursery.close()  # else it goes on for its workers, and ends with this process
        _nursery = Nursery()
    return _nursery


# ---- the other side ------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> None:
    """Fork for every request, tell every end; until the asking process is gone."""
    workers: dict[int, int] = {}  # pidfd -> pid
    own = os.getpid()  # a fork that asks who its parent is may be told of another, if we are gone by then
    while True:
        for end in readable([channel.fileno(), *workers], None):
            if end == channel.fileno():
                data, fds, _, _ = socket.recv_fds(channel, _MOST_BYTES, 1)
                if not data:
                    return
                pid = os.fork()
                if not pid:
                    channel.close()
                    for other in workers:
                        os.close(other)
                    _become(json.loads(data), fds[0] if fds else -1, own)
                for fd in fds:
                    os.close(fd)
                workers[os.pidfd_open(pid)] = pid
                channel.send(json.dumps({"pid": pid}).encode())
            else:
                pid = workers.pop(end)
                _, status = os.waitpid(pid, 0)
                os.close(end)
                channel.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become(request: dict[str, Any], fd: int, parent: int) -> None:
    """Turn this process into a worker; never returns."""
    from flowspec_edge.runtime import worker

    code = 1
    try:
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        code = worker.serve(Path(request["config"]), request["verbose"],
                            {"listen_fd": fd, "parent": parent})
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    """Import, then serve."""
    import flowspec_edge.runtime.worker_load  # noqa: F401

    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _serve(channel)


if __name__ == "__main__":
    main()
