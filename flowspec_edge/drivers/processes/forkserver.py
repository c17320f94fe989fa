"""Workers forked from ``multiprocessing``'s fork server, which has already imported torch and transformers.

The imports take seconds, and forks share the memory of imported modules. Workers on a CPU only, because no
other torch device survives a fork.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.interpreter import guarded_starts

STAGE = "flowspec_edge.drivers.stage"  # ``python -m`` runs it; a fork calls ``serve`` of its ``process``
STOPPED, ENDED = "T", "Z"
_PRELOAD = [f"{STAGE}.load", f"{STAGE}.worker", f"{STAGE}.process", __name__]
FIRST_START_S = 120.0  # for a start that waits for the imports, from a slow disk
_LEAST_START_S = 1.0  # for a start whose deadline is nearer, or over
_START_S = 5.0  # for a start after the fork server's imports
_POLL_S = 0.01
_EXIT_CODE_S = 5.0  # between a worker's end and the fork server's report of its exit code
_UNREPORTED = 255  # multiprocessing's exit code if there is no report
_TEND_S = 10.0  # between two starts by ``tend``, because a fork server may end at once

_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
_preloaded_at = 0.0  # when the fork server was started (time.monotonic)
_tended_at = -_TEND_S


def preload() -> None:
    """Start this process' fork server unless it runs; its imports continue in the background.

    FlowspecError if the system does not permit it.
    """
    global _preloaded_at
    before = server_pid()
    _context.set_forkserver_preload(_PRELOAD)
    with guarded_starts():
        resource_tracker.ensure_running()  # first: it changes the signal mask
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process
    try:
        with guarded_starts():
            forkserver.ensure_running()
    except OSError as error:  # such as a TMPDIR whose name is too long for a socket's path
        raise FlowspecError(f"cannot start the fork server for workers in {tempfile.gettempdir()}: {error}; "
                            "choose another directory with TMPDIR") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if server_pid() != before:
        _preloaded_at = time.monotonic()


def tend() -> None:
    """Start another fork server if it has ended or was stopped, so that no worker has to wait for the imports later.

    To be called several times a second while workers run.
    """
    global _tended_at
    server, now = server_pid(), time.monotonic()
    if server is None or now < _tended_at + _TEND_S:
        return
    state = process_state(server)
    if state == STOPPED:
        _kill(server)
    if state in (STOPPED, ENDED):
        _tended_at = now
        with suppress(FlowspecError):  # for example, the disk is full; the next worker's start reports it
            preload()


def server_pid() -> int | None:
    """Return the fork server's process id; None before the first :func:`preload`."""
    pid: int | None = vars(forkserver)["_forkserver"]._forkserver_pid  # no public API
    return pid


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process' state: STOPPED, ENDED, or others.

    STOPPED is by a signal such as SIGSTOP, not by a debugger.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ENDED


@atexit.register  # before multiprocessing's own handler, which waits for every worker without limit
def _end_server() -> None:
    server = server_pid()
    if server is not None:
        _kill(server)
        with suppress(ChildProcessError):
            os.waitpid(server, 0)  # it has been killed


class WorkerProcess:
    def __init__(self, config: Path, output: Path, listen_fd: int = -1, directory: Path | None = None,
                 within: float = FIRST_START_S, program: str = STAGE) -> None:
        """Start a worker of ``program`` that reads ``config`` and writes stdout and stderr to ``output``.

        The worker inherits this process' environment (except what torch reads at import time). It ends when
        this process ends, not when its fork server ends; if this process was killed, the worker removes
        ``directory``. FlowspecError if the fork server fails, or does not start the worker in ``within``
        seconds.
        """
        listener = socket.socket(fileno=os.dup(listen_fd)) if listen_fd >= 0 else None
        try:
            self._process, self._server = _start(
                within, program, config, output, dict(os.environ), listener, directory)
        finally:
            if listener:
                listener.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._code: int | None = None
        self.unreported = False  # whether the exit code is unknown, because the fork server ended or hung
        try:  # the kernel reports every exit; the fork server only while it runs
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._code = self._reap()

    def poll(self) -> int | None:
        """Return the exit code, or None while the worker runs; 255 if its fork server ended first."""
        if self._code is None and connection.wait([self._pidfd], 0):
            self._code = self._reap()
            os.close(self._pidfd)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self._code is None:
            connection.wait([self._pidfd], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, which ends even a stopped process."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> int | None:
        self._process.join(_EXIT_CODE_S)
        if self._process.exitcode is None:
            _kill(self._server)
            self._process.join()  # ends at once: the killed server held the other end of the pipe
        code = self._process.exitcode
        self.unreported = code == _UNREPORTED
        with suppress(ChildProcessError):  # in a container this process may be the init that adopted it
            os.waitpid(self.pid, os.WNOHANG)
        self._process.close()
        return code


def _start(within: float, *args: object) -> tuple[ForkServerProcess, int]:
    """Start a worker; return it and its fork server's process id. FlowspecError if it does not start in time.

    A fork server that was stopped, hangs in its imports for too long, or does not answer after them is killed
    and replaced once. A fork server that still imports is kept, so that a later start can use it.
    """
    deadline, retry = time.monotonic() + within, True
    with _starting:
        if (stopped_server := server_pid()) is not None and process_state(stopped_server) == STOPPED:
            _kill(stopped_server)
        while True:
            preload()
            server = server_pid()
            assert server is not None
            waits_until = max(min(deadline, _preloaded_at + FIRST_START_S), time.monotonic() + _LEAST_START_S)
            while not (ready := _has_imported(server)) and time.monotonic() < waits_until:
                time.sleep(_POLL_S)  # polled, because the end of the imports is not signalled
            if not ready and time.monotonic() < _preloaded_at + FIRST_START_S:
                raise FlowspecError(f"the fork server for workers (process {server}) does not answer: its "
                                    f"imports take more than {within:.0f} s")
            process = _context.Process(target=_run, args=args, daemon=True)
            patience = max(_LEAST_START_S, min(_START_S, deadline - time.monotonic()))
            guard = threading.Timer(patience, _kill, [server])
            guard.start()
            try:
                with _no_main_module(), guarded_starts():  # it may have to start another fork server
                    process.start()
                return process, server
            except (EOFError, OSError) as error:
                if not retry or time.monotonic() >= deadline:
                    raise FlowspecError(f"the fork server for workers (process {server}) does not answer: "
                                        f"{error or type(error).__name__}") from error
                retry = False
                if server_pid() == server:
                    _kill(server)
            finally:
                guard.cancel()


def _has_imported(server: int) -> bool:
    """Return whether the fork server has finished its imports and reads from its socket.

    The socket accepts connections before. Once the server reads, multiprocessing handles SIGCHLD. Also True for a
    fork
    server that has ended, because a start then fails at once.
    """
    try:
        status = Path(f"/proc/{server}/status").read_text(errors="replace")
    except OSError:
        return True
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return fields["State"].startswith(ENDED) or bool(int(fields["SigCgt"], 16) >> signal.SIGCHLD - 1 & 1)


def _kill(pid: int) -> None:
    """Kill a fork server and wait for its end; multiprocessing reaps it.

    Without the wait, the next start would find a server that still seems to run but refuses connections.
    """
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # no deadline: SIGKILL also ends a stopped process


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing this process' main script in the worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _remove_sockets() -> None:
    """Remove the directory of the fork server's socket, in a worker.

    The process that made the directory could not remove it if it was killed.
    """
    starter = multiprocessing.parent_process()
    if starter and not starter.is_alive():
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # a child inherits the starter's directory


def _run(program: str, config: Path, output: Path, environment: Mapping[str, str],
         listener: socket.socket | None, directory: Path | None) -> None:
    os.setsid()  # Ctrl-C is for D0, which then ends its workers in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    util.Finalize(None, _remove_sockets, exitpriority=0)
    os.environ.clear()
    os.environ.update(environment)
    config_changes = {"listen_fd": listener.detach() if listener else -1}
    process = import_module(f"{program}.process")  # imported here, because D0 does not need it
    sys.exit(process.serve(config, config_changes=config_changes, directory=directory))
