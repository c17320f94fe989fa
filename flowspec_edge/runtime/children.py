"""Worker processes on this machine: starting, watching and ending them.

Knows processes, exit codes and what they wrote to stderr.  Does not know what workers do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import flowspec_edge
from flowspec_edge.runtime.nursery import Nursling, nursery
from flowspec_edge.runtime.waiting import readable
from flowspec_edge.runtime.workerconfig import WorkerConfig

Within = Callable[[int, Sequence[str]], list[str]]

_GRACE_S = 2.0  # between asking a process to end and killing it


class Children:
    """One process a stage; ``directory`` holds their configurations, keys and stderr files."""

    def __init__(self) -> None:
        self._temporary = TemporaryDirectory(prefix="flowspec-")
        self.directory = Path(self._temporary.name)
        self._processes: list[subprocess.Popen[bytes] | Nursling] = []
        self._starts: list[Callable[[], subprocess.Popen[bytes] | Nursling]] = []  # of each stage

    @property
    def pids(self) -> list[int]:
        """Process ids, V1's first."""
        return [process.pid for process in self._processes]

    def start(self, configs: Sequence[WorkerConfig], verbose: bool = False, within: Within | None = None,
              ) -> None:
        """Start a worker for each of ``configs``; ``within`` says what to run for a place's command.

        Without that, workers that compute on the CPU are forked (``nursery``): no other device
        survives a fork.
        """
        for config in configs:
            file = self.directory / f"v{config.stage}.toml"
            file.write_text(config.dump(), encoding="utf-8")
            self._starts.append(partial(self._started, config, file, verbose, within))
            self._processes.append(self._starts[-1]())

    def restart(self, stages: Sequence[int], between: Callable[[], None] | None = None) -> None:
        """End these at once, whatever they are at, then start them again as they were; ``between`` is
        called when all have ended.

        Their listening sockets must still be open here.
        """
        for stage in stages:
            self._processes[stage - 1].kill()  # works on a stopped process, too
            self._processes[stage - 1].wait()
        if between:
            between()
        for stage in stages:
            self._processes[stage - 1] = self._starts[stage - 1]()

    def _started(self, config: WorkerConfig, file: Path, verbose: bool, within: Within | None,
                 ) -> subprocess.Popen[bytes] | Nursling:
        if within is None and config.device == "cpu":
            return nursery().start(file, self._stderr(config.stage), config.listen_fd, verbose)
        return self._spawned(config, file, verbose, within)

    def _spawned(self, config: WorkerConfig, file: Path, verbose: bool, within: Within | None,
                 ) -> subprocess.Popen[bytes]:
        package = str(Path(flowspec_edge.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "flowspec_edge.runtime.worker", "--config", str(file),
                   *(["--verbose"] if verbose else [])]
        with self._stderr(config.stage).open("wb") as stderr:
            return subprocess.Popen(
                within(config.stage, command) if within else command, stdin=subprocess.DEVNULL,
                stdout=stderr, stderr=stderr,  # our own stdout is for the answer alone
                pass_fds=[config.listen_fd] if config.listen_fd >= 0 else [],
                start_new_session=True,  # Ctrl-C is for D0, which then ends them in order
                env={**os.environ, "PYTHONPATH": path})

    def ended(self) -> dict[int, str]:
        """The stages whose processes have ended, and why: "V2 was killed by ..."."""
        codes = {stage: process.poll() for stage, process in enumerate(self._processes, start=1)}
        return {stage: f"V{stage} {self._cause(stage, code)}"
                for stage, code in codes.items() if code is not None}

    def exited(self) -> str | None:
        """The first process that has ended, and why; None while all run."""
        return next(iter(self.ended().values()), None)

    def exited_within(self, timeout: float) -> str | None:
        """The same, when something else says that one must be ending just now."""
        cause = self.exited()
        if cause is None and self._processes and timeout > 0:
            with ExitStack() as opened:
                ends = [os.pidfd_open(pid) for pid in self.pids]
                for end in ends:
                    opened.callback(os.close, end)
                readable(ends, timeout)  # whichever ends first
            cause = self.exited()
        return cause

    def end(self) -> None:
        """End and reap all of them, within about two seconds; safe to call twice."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # works on a stopped process, too
                process.wait()
        self._temporary.cleanup()

    def wait(self, timeout: float) -> None:
        """Give processes that were asked to end up to ``timeout`` seconds for it."""
        deadline = time.monotonic() + timeout
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def _cause(self, stage: int, code: int) -> str:
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        lines = self._stderr(stage).read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        last = said[-1].removeprefix("flowspec worker: ") if said else "it left no word"
        return f"ended with exit code {code}: {last}"

    def _stderr(self, stage: int) -> Path:
        return self.directory / f"v{stage}.stderr"
