"""The stages that run on this machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from flowspec_edge.drivers.processes.forkserver import (
    FIRST_START_S,
    STAGE,
    STOPPED,
    WorkerProcess,
    process_state,
    tend,
)
from flowspec_edge.drivers.processes.stage_thread import StageThread, shares_a_process
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import FlowspecError, ended
from flowspec_edge.util.interpreter import module_command

Wrap = Callable[[int, Sequence[str]], list[str]]
AnyWorker = subprocess.Popen[bytes] | WorkerProcess | StageThread

_GRACE_S = 2.0  # between SIGTERM and SIGKILL
_KILLED_S = 30.0  # after SIGKILL; only a process that waits inside the kernel takes so long
_POLL_S = 0.02
_STOPPED_S = 2.0  # a worker that has been stopped for so long counts as lost
_UNWATCHED_S = 1.0  # after a longer time between two checks, a stopped worker may have run meanwhile


class WorkerProcesses:
    """One process per stage; ``directory`` holds their configurations, keys and outputs.

    If this process is killed, the workers remove it.
    """

    def __init__(self, program: str = STAGE) -> None:
        """Set up without processes; ``program``: the package that runs a stage."""
        self._program = program
        self._starters: list[Callable[[float], AnyWorker]] = []  # by stage; of the seconds allowed
        self._workers: list[AnyWorker] = []
        self._looked_at = 0.0
        self._stopped_at: dict[int, float] = {}  # by stage; of the workers that are stopped

    @cached_property
    def _temporary(self) -> TemporaryDirectory[str]:
        """Make the temporary directory on first use.

        A draft device whose stages run elsewhere needs none, and would leave it behind if it was killed.
        """
        return TemporaryDirectory(prefix="flowspec-")

    @property
    def directory(self) -> Path:
        return Path(self._temporary.name)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def start(self, configs: Sequence[WorkerConfig], wrap: Wrap | None = None) -> None:
        """Start the stages; ``wrap``: (stage, command) -> command at the stage's place.

        Without it, CPU workers are forked, and the only stage on a GPU is a thread of this process.
        """
        for config in configs:
            file = self.directory / f"v{config.stage}.toml"
            file.write_text(config.dump(), encoding="utf-8")
            starter: Callable[[float], AnyWorker]
            if wrap is None and self._program == STAGE and shares_a_process(configs):
                starter = partial(self._thread, config)
            elif wrap is None and config.device == "cpu":
                starter = partial(
                    WorkerProcess, file, self._output(config.stage), config.listen_fd, self.directory,
                    program=self._program)
            else:
                starter = partial(self._spawn, config, file, wrap)
            self._starters.append(starter)
            self._workers.append(starter(FIRST_START_S))

    def restart(self, stages: Sequence[int], within: float = FIRST_START_S) -> None:
        """Kill and restart these workers.

        Their listening sockets must still be open in this process. FlowspecError if they do not start in ``within``
        seconds.
        """
        deadline = time.monotonic() + within
        for stage in stages:
            self._kill(stage)
        for stage in stages:
            self._workers[stage - 1] = self._starters[stage - 1](deadline - time.monotonic())
            self._stopped_at.pop(stage, None)

    def _thread(self, config: WorkerConfig, within: float) -> StageThread:
        """Start a thread; ``within`` is not used, because that start waits for nothing."""
        return StageThread(config, self._output(config.stage))

    def _spawn(self, config: WorkerConfig, file: Path, wrap: Wrap | None, within: float
               ) -> subprocess.Popen[bytes]:
        """Start a program; ``within`` is not used, because that start waits for nothing."""
        command = module_command(self._program, "--config", str(file), "--remove", str(self.directory))
        with self._output(config.stage).open("wb") as output:
            return subprocess.Popen(
                wrap(config.stage, command) if wrap else command, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output,  # this process' stdout is for the answer only
                pass_fds=[config.listen_fd] if config.listen_fd >= 0 else [],
                start_new_session=True)  # Ctrl-C is for D0, which then ends its workers in order

    def ended(self) -> dict[int, str]:
        """Return why workers have ended, by stage: "V2 was killed by SIGKILL".

        A worker that has been stopped for two seconds is killed first, because the kernel shows that it is stopped
        sooner than its silence shows that it is lost.
        """
        self._end_stopped()
        codes = {stage: worker.poll() for stage, worker in enumerate(self._workers, start=1)}
        return {stage: f"V{stage} {self._cause(stage, code)}"
                for stage, code in codes.items() if code is not None}

    def _end_stopped(self) -> None:
        now = time.monotonic()
        if now > self._looked_at + _UNWATCHED_S:
            self._stopped_at.clear()
        self._looked_at = now
        for stage, worker in enumerate(self._workers, start=1):
            if process_state(worker.pid) != STOPPED:
                if worker.poll() is None:
                    self._stopped_at.pop(stage, None)
            elif now >= self._stopped_at.setdefault(stage, now) + _STOPPED_S:
                self._kill(stage)

    def exited(self, within: float = 0.0) -> str | None:
        """Wait up to ``within`` seconds for a worker to end, also if there is none.

        Return the reason of the first one, or None. Meanwhile another fork server is started if it has ended.
        """
        tend()
        deadline = time.monotonic() + within
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # polled: workers may be forks or programs, which have no common handle
        return next(iter(self.ended().values()), None)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with suppress(subprocess.TimeoutExpired):
            for worker in self._workers:
                worker.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End all workers within about two seconds; idempotent."""
        running = [worker for worker in self._workers if worker.poll() is None]
        for worker in running:
            worker.terminate()
        self.wait(_GRACE_S)
        for stage in range(1, len(self._workers) + 1):
            with suppress(FlowspecError):  # a worker that cannot be killed must not keep the others alive
                self._kill(stage)
        self._temporary.cleanup()

    def _kill(self, stage: int) -> None:
        """Kill a stage's process; FlowspecError if the kernel cannot end it."""
        worker = self._workers[stage - 1]
        worker.kill()  # ends a stopped process, too
        try:
            worker.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            raise FlowspecError(f"V{stage} (process {worker.pid}) does not end after SIGKILL: it waits for a "
                                "disk or a device driver; see the kernel's log (dmesg)") from None

    def _cause(self, stage: int, code: int) -> str:
        if stage in self._stopped_at:
            return "was stopped, and did not go on before it was killed"
        if code < 0:
            return f"was {ended(code)}"
        worker = self._workers[stage - 1]
        if isinstance(worker, WorkerProcess) and worker.unreported:
            return "has ended; the fork server, which knows how, had ended or hung"
        file = self._output(stage)
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else []
        messages = [line.strip() for line in lines if line.strip()]
        last = messages[-1].removeprefix("flowspec worker: ") if messages else "no error message"
        return f"ended with {ended(code)}: {last}"

    def _output(self, stage: int) -> Path:
        return self.directory / f"v{stage}.stderr"
