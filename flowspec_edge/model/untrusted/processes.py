"""Processes with limits, for work on what clients and checkpoints send: grammars and chat templates.

Neither a library's native code nor a template can be interrupted within a process, and neither bounds its
work. A process that exceeds a limit is killed and replaced; the others stay for the next job.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.interpreter import module_command

_PATIENCE_S = 0.5  # after which a job gives way to the pipeline
_NICE = 10
_LOOK_S = 0.1  # between two looks at the deadline, and whether the job has been cancelled
_END_S = 5.0  # for a process to end after a signal, or after it has closed its socket
_MAX_REPLY = 16 * 2**20  # bytes
_TRIES = 2  # a process may have been ended from outside before it got its job


@dataclass(frozen=True)
class Limits:
    """The limits of one job.

    cpu_s   seconds of CPU time
    wall_s  seconds in all: on a machine with other work a job gets a part of a core
    memory  bytes of address space beyond those of a process without a job
    stack   bytes; far less than the threads have that do the same later, without limits
    """

    cpu_s: float
    memory: int
    stack: int
    wall_s: float = 20.0


class LimitExceeded(UsageError):
    """A job needs too much; the message says of what. ``certain``: the same job will always do so."""

    def __init__(self, message: str, certain: bool = True) -> None:
        super().__init__(message)
        self.certain = certain


class JobCancelled(FlowspecError):
    """Its result is no longer needed."""


class ProcessesUnavailable(FlowspecError):
    """No process can be started, or none lives long enough to take a job."""

    retry_after = 5  # seconds


_cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


@contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """Jobs that this thread runs within end with JobCancelled when ``event`` is set."""
    token = _cancelled.set(event)
    try:
        yield
    finally:
        _cancelled.reset(token)


class LimitedProcesses:
    """Up to ``count`` processes that do jobs of one ``kind`` of ``__main__.JOBS``.

    Thread-safe. The processes start when they are needed, and end with this object, or with the process that it is
    in.
    """

    def __init__(self, kind: str, limits: Limits, count: int = 2) -> None:
        self.limits = limits
        self._kind = kind
        self._slots = threading.BoundedSemaphore(count)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._end = weakref.finalize(self, _end_all, self._all)

    def start(self) -> None:
        """Start one process ahead of the first job, without waiting for it."""
        if not self._all:
            with suppress(ProcessesUnavailable):
                self._idle.append(self._started())

    def run(self, job: dict[str, Any]) -> str:
        """Return a job's result.

        UsageError if the job fails, LimitExceeded if it needs too much, JobCancelled, or ProcessesUnavailable.
        """
        data = json.dumps(job, default=str).encode()
        with self._slots:
            deadline = time.monotonic() + self.limits.wall_s
            for _ in range(_TRIES):
                reply = self._reply(data, deadline)
                if reply is not None:
                    break
            else:
                raise ProcessesUnavailable(f"the process for a {self._kind} ended before it had its job")
        if reply["error"] is not None:
            raise UsageError(reply["error"])
        return str(reply["result"])

    def close(self) -> None:
        self._end()

    def _reply(self, data: bytes, deadline: float) -> dict[str, Any] | None:
        """Give the process a job and return its reply; None: the process had ended before."""
        process = self._take()
        reusable = False
        try:
            reply = process.exchange(data, deadline)
            if reply is not None:
                reusable = bool(reply["reusable"]) and not process.is_slowed
                return reply
            code = process.exit_code()
        finally:
            if reusable:
                self._idle.append(process)
            else:
                self._discard(process)
        if code == -signal.SIGPROF:
            raise LimitExceeded(f"more than {self.limits.cpu_s:g} s of CPU time")
        if code == -signal.SIGSEGV:
            raise LimitExceeded("nested too deeply")
        if code in (-signal.SIGABRT, -signal.SIGKILL):  # a failed allocation, or the system's own limit
            raise LimitExceeded(f"more than {self.limits.memory >> 20} MiB", code == -signal.SIGABRT)
        return None

    def _take(self) -> _Process:
        with suppress(IndexError):
            while not (process := self._idle.pop()).is_alive:
                self._discard(process)
            return process
        return self._started()

    def _discard(self, process: _Process) -> None:
        process.end()
        self._all.discard(process)

    def _started(self) -> _Process:
        try:
            process = _Process(self._kind, self.limits)
        except OSError as error:
            raise ProcessesUnavailable(f"no process can be started for a {self._kind}: {error}") from error
        self._all.add(process)
        return process


class _Process:
    """Takes a job as its length (8 bytes, big-endian) and JSON, and replies alike."""

    def __init__(self, kind: str, limits: Limits) -> None:
        self._socket, child_end = socket.socketpair()
        with child_end:
            try:
                self._process = subprocess.Popen(
                    module_command(__package__, kind, json.dumps(asdict(limits))),
                    stdin=child_end.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True)  # Ctrl-C is for the program, which ends its processes
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._slow_at = 0.0
        self.is_slowed = False

    def exchange(self, data: bytes, deadline: float) -> dict[str, Any] | None:
        """Return the reply, or None if the process ends without one."""
        self._slow_at = time.monotonic() + _PATIENCE_S
        try:
            self._send(len(data).to_bytes(8, "big") + data, deadline)
            size = int.from_bytes(self._receive(8, deadline), "big")
            if size > _MAX_REPLY:
                raise LimitExceeded(f"a result of more than {_MAX_REPLY >> 20} MiB")
            reply: dict[str, Any] = json.loads(self._receive(size, deadline))
            return reply
        except (OSError, EOFError):
            return None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exit_code(self) -> int:
        """Return the exit code of a process that has closed its socket."""
        try:
            return int(self._process.wait(_END_S))
        except subprocess.TimeoutExpired:
            return 0

    def end(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._socket.close()

    def _send(self, data: bytes, deadline: float) -> None:
        remaining = memoryview(data)
        while remaining:
            self._wait(select.POLLOUT, deadline)
            remaining = remaining[self._socket.send(remaining):]

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(select.POLLIN, deadline)
            piece = self._socket.recv(min(size - len(data), 2**20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _wait(self, events: int, deadline: float) -> None:
        """Wait for the socket; poll, because select has no descriptors above 1023."""
        poll = select.poll()
        poll.register(self._socket, events)
        cancelled = _cancelled.get()
        while not poll.poll(_LOOK_S * 1000):
            if cancelled is not None and cancelled.is_set():
                raise JobCancelled("the client has gone")
            now = time.monotonic()
            if now > self._slow_at and not self.is_slowed:
                self.is_slowed = True
                with suppress(OSError):  # it may have ended
                    os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)
            if now > deadline:
                raise LimitExceeded("more time than there is while the machine is busy", certain=False)


_RENDERING = Limits(cpu_s=2.0, memory=256 * 2**20, stack=8 * 2**20)


class TemplateRenderer(LimitedProcesses):
    """Renders chat templates of checkpoints; the text is that of transformers' ``apply_chat_template``."""

    def __init__(self) -> None:
        super().__init__("template", _RENDERING)

    def render(self, template: str, special_tokens: Mapping[str, Any], messages: Sequence[Mapping[str, Any]],
               tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = False,
               values: Mapping[str, Any] | None = None) -> str:
        """Render a chat template; UsageError if it fails, rejects the chat, or needs too much for it.

        ``special_tokens``: a tokenizer's ``special_tokens_map``; ``values``: further variables.
        """
        context = {"documents": None, **(values or {}), **special_tokens, "messages": messages,
                   "tools": tools or None,
                   "add_generation_prompt": add_generation_prompt}
        try:
            return self.run({"template": template, "context": context})
        except LimitExceeded as error:
            raise UsageError(f"it needs too much: {error}") from error


def _end_all(processes: set[_Process]) -> None:
    for process in list(processes):
        process.end()
