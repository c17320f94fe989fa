"""Servers to strike at: ``flowspec serve`` with its stages on this machine, and ``flowspec draft`` with
services in network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import httpx2
from kits.services import Services, command, free_port, own_address
from kits.sharded_models import cut

from flowspec_edge.lab.links.namespaces import NetnsTestbed
from flowspec_edge.model.opened import OpenModel
from tests.chaos.processes import children, command_line, descendants, running

PATIENCE_S = 300.0  # only what hangs takes so long
_POLL_S = 0.02
_DISK = "16m"


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about within {PATIENCE_S:g} s")
        time.sleep(_POLL_S)


class Service(ABC):
    """
    deaths  how often the draft device was killed
    down    between a kill and the new server's first token
    seen    process ids of everything that ever ran for it
    """

    url = ""

    def __init__(self, directory: Path, shim: Path | None) -> None:
        """``shim``: a library for LD_PRELOAD, built of clock.c."""
        directory.mkdir(parents=True)
        self.directory = directory
        self.log = directory / "log"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.deaths = 0
        self.down = True
        self.seen: set[int] = set()
        self._clock = directory / "clock"
        self.set_clock(0)
        self._environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        if shim:
            self._environment |= {"LD_PRELOAD": str(shim), "CHAOS_CLOCK": str(self._clock)}
        self._draft: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self) -> Sequence[str]:
        ...

    @abstractmethod
    def stage_pid(self, stage: int) -> int | None:
        """None while it does not run."""

    def network(self) -> AbstractContextManager[None]:
        """Where its clients are."""
        return nullcontext()

    @property
    def draft_pid(self) -> int:
        assert self._draft is not None
        return self._draft.pid

    def processes(self) -> set[int]:
        """All that run for it now."""
        found = {self.draft_pid, *descendants(self.draft_pid)}
        self.seen |= found
        return found

    def start(self) -> None:
        """Wait for the first token."""
        with self.log.open("ab") as log:
            self._draft = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                           env=self._environment, cwd=self.directory)
        until(lambda: self.ready() or not running(self.draft_pid), "the first token")
        if not self.ready():
            raise RuntimeError(f"the server ended at its start: {self.log.read_text()[-2000:]}")
        self.down = False

    def ready(self) -> bool:
        return self.readiness() == ""

    def readiness(self) -> str:
        """"": it is ready, else why not."""
        try:
            with self.network(), httpx2.Client(trust_env=False, timeout=PATIENCE_S) as http:
                answer = http.get(f"{self.url}/ready")
            return "" if answer.status_code == 200 else str(answer.json()["reason"])
        except httpx2.TransportError as error:
            return f"no connection: {error!r}"

    def kill_draft(self) -> None:
        """SIGKILL; return when all that it started has ended, too."""
        started = self.processes() - {self.draft_pid}
        self.down, self.deaths = True, self.deaths + 1
        os.kill(self.draft_pid, signal.SIGKILL)
        assert self._draft is not None
        self._draft.wait()
        until(lambda: not any(map(running, started)), "the end of a killed server's processes")

    def set_clock(self, seconds: int) -> None:
        """Its wall clock, from the machine's."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    def close(self) -> list[str]:
        """End it; what it left behind or did wrong."""
        wrong = []
        self.processes()
        assert self._draft is not None
        if self._draft.poll() is None:
            self._draft.send_signal(signal.SIGTERM)
            try:
                if code := self._draft.wait(PATIENCE_S):
                    wrong.append(f"the server ended with exit code {code} upon SIGTERM")
            except subprocess.TimeoutExpired:
                wrong.append(f"the server does not end within {PATIENCE_S:g} s upon SIGTERM")
                self._draft.kill()
                self._draft.wait()
        with suppress(TimeoutError):
            until(lambda: not any(map(running, self.seen)), "the end")
        if left := [pid for pid in self.seen if running(pid)]:
            wrong.append(f"processes are left: {[command_line(pid) for pid in left]}")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if files := [str(file.relative_to(self.temporary)) for file in self.temporary.rglob("*")]:
            wrong.append(f"left in TMPDIR: {files}")
        return wrong


class LocalService(Service):
    def __init__(self, directory: Path, shim: Path | None, model: OpenModel, strategy: str, stages: int,
                 small_disk: bool) -> None:
        super().__init__(directory, shim)
        host = own_address()
        port = free_port(host)
        self.url = f"http://{host}:{port}"
        self._arguments = ["--model", str(model.path), "--name", "demo", "--strategy", strategy, "--stages",
                           str(stages), "--host", host, "--port", str(port), "--queue", "32",
                           "--at-once", "3"]
        self._mounted = small_disk
        if small_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "chaos", str(self.temporary)],
                           check=True)

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-m", "flowspec_edge.cli.main", "serve", *self._arguments]

    @property
    def fork_server(self) -> int | None:
        return next((pid for pid in children(self.draft_pid)
                     if "multiprocessing.forkserver" in command_line(pid)), None)

    def stage_pid(self, stage: int) -> int | None:
        return self._stages().get(stage)

    def processes(self) -> set[int]:
        found = super().processes() | {*self._stages().values()}
        self.seen |= found
        return found

    def _stages(self) -> dict[int, int]:
        """Process ids by stage: each writes to a file of its own. They outlive their fork server, and then do
        not descend from the draft device."""
        found = {}
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            with suppress(OSError):  # it may end meanwhile
                output = Path(os.readlink(f"/proc/{pid}/fd/2"))
                if output.is_relative_to(self.temporary) and output.match("v[0-9]*.stderr"):
                    found[int(output.stem[1:])] = pid
        return found

    def fill_disk(self) -> None:
        with (self.temporary / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free_disk(self) -> None:
        (self.temporary / "ballast").unlink(missing_ok=True)

    def close(self) -> list[str]:
        try:
            return super().close()
        finally:
            if self._mounted:
                subprocess.run(["umount", "--lazy", str(self.temporary)], check=True)


class LinkedService(Service):
    """Workers are started anew when they end, as a service manager would."""

    def __init__(self, directory: Path, shim: Path | None, model: OpenModel, strategy: str, stages: int
                 ) -> None:
        super().__init__(directory, shim)
        cut(model.path, directory / "model", stages)
        self.bed = NetnsTestbed(stages)
        self._services = Services(directory / "model", directory / "services", {"strategy": strategy,
                                                                                "name": "demo"},
                                  hosts=[self.bed.address(place) for place in range(stages + 1)])
        self.url = self._services.url
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._ending = threading.Event()
        self._manager = threading.Thread(target=self._tend, daemon=True)

    def _command(self) -> Sequence[str]:
        return self.bed.command(0, command("draft", self._services.draft_file))

    def start(self) -> None:
        if not self._workers:
            for stage in range(1, self.bed.places):
                self._start_worker(stage)
            self._manager.start()
        super().start()

    def stage_pid(self, stage: int) -> int | None:
        worker = self._workers[stage]
        return worker.pid if worker.poll() is None else None

    def processes(self) -> set[int]:
        """Without a worker's short-lived helpers."""
        found = {self.draft_pid, *(worker.pid for worker in self._workers.values())}
        self.seen |= found
        return found

    @contextmanager
    def network(self) -> Iterator[None]:
        with self.bed.entered(0):
            yield

    def kill_draft(self) -> None:
        self.down, self.deaths = True, self.deaths + 1
        os.kill(self.draft_pid, signal.SIGKILL)
        assert self._draft is not None
        self._draft.wait()

    def plug(self, stage: int, state: str) -> None:
        """The cable of V``stage``: "up" or "down"."""
        link = ["ip", "link", "set", self.bed.interface(stage), state]
        subprocess.run(self.bed.command(stage, link), check=True)

    def close(self) -> list[str]:
        self._ending.set()
        self._manager.join(PATIENCE_S)
        wrong = []
        for stage, worker in self._workers.items():
            worker.send_signal(signal.SIGTERM)
            try:
                if code := worker.wait(PATIENCE_S):
                    wrong.append(f"V{stage} ended with exit code {code} upon SIGTERM")
            except subprocess.TimeoutExpired:
                wrong.append(f"V{stage} does not end within {PATIENCE_S:g} s upon SIGTERM")
                worker.kill()
                worker.wait()
        wrong += super().close()
        self.bed.close()
        shutil.rmtree(self.directory / "model")
        return wrong

    def _start_worker(self, stage: int) -> None:
        file = self._services.worker_files[stage - 1]
        with self.log.open("ab") as log:
            self._workers[stage] = subprocess.Popen(
                self.bed.command(stage, command("worker", file)), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=self._environment, cwd=self.directory)

    def _tend(self) -> None:
        while not self._ending.wait(_POLL_S):
            for stage, worker in list(self._workers.items()):
                if worker.poll() is not None:
                    self._start_worker(stage)
