"""Forked workers: their exits are noticed; they end with D0, but not with the fork server."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from kits import network_beds
from kits.process_clusters import PATIENCE, PROMPT, on_third, until
from kits.rail_files import board, once_measured

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes import forkserver
from flowspec_edge.drivers.processes.forkserver import WorkerProcess, server_pid
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import FlowspecError


def status(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{field}:"))


def handles_sigterm(worker: WorkerProcess) -> bool:
    return bool(int(status(worker.pid, "SigCgt"), 16) >> signal.SIGTERM - 1 & 1)


@pytest.mark.parametrize(("act", "code"), [("terminate", 0), ("kill", -signal.SIGKILL)])
def test_a_worker_runs_until_it_is_ended(config: Path, tmp_path: Path, act: str, code: int) -> None:
    worker, other = WorkerProcess(config, tmp_path / "output"), WorkerProcess(config, tmp_path / "other")
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.2)
        assert worker.poll() is None
        until(lambda: handles_sigterm(worker))
        assert os.getsid(worker.pid) == worker.pid  # Ctrl-C does not reach it
        server = server_pid()
        assert server is not None
        assert int(status(server, "SigBlk"), 16) >> signal.SIGINT - 1 & 1
        getattr(worker, act)()
        assert worker.wait(PATIENCE) == code
        assert worker.poll() == code
        worker.kill()  # too late, and harmless
        assert other.poll() is None
    finally:
        other.kill()
    assert other.wait(PATIENCE) == -signal.SIGKILL


def test_a_worker_has_the_environment_of_its_start(tiny_model: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server, which may be older, has another one."""
    forkserver.preload()
    monkeypatch.setenv("FLOWSPEC_SYSFS", str(board(tmp_path, 7.0)))
    with ProcessCluster(ClusterSpec(tiny_model, 1, threads=1)).start() as cluster:
        request = Request(list(range(9)), "autoregressive", 2)
        stage = once_measured(lambda: cluster.generate(request).stats.stages[0],
                              lambda told: "session_j" in told, tries=3)
    assert stage["session_j"] > 0


def test_descriptors_above_those_of_select(tmp_path: Path) -> None:
    with ExitStack() as opened:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limit[1]), limit[1]))
        highest = 0
        while highest < 1024:
            highest = os.dup(0)
            opened.callback(os.close, highest)
        assert WorkerProcess(tmp_path / "nothing.toml", tmp_path / "output").wait(PATIENCE) == 2


def test_an_error_is_in_the_output_and_the_exit_code(tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path / "nothing.toml", tmp_path / "output")
    assert worker.wait(PATIENCE) == 2
    alone = subprocess.run([sys.executable, "-m", "flowspec_edge.drivers.stage", "--config",
                            str(tmp_path / "nothing.toml")], capture_output=True, text=True, check=False)
    assert ((tmp_path / "output").read_text(), 2) == (alone.stderr, alone.returncode)


def test_threads_may_start_workers_at_once(tmp_path: Path) -> None:
    """A start replaces this process' main module for a moment."""
    main = sys.modules["__main__"]

    def start(number: int) -> WorkerProcess:
        return WorkerProcess(tmp_path / "nothing.toml", tmp_path / f"output{number}")

    with ThreadPoolExecutor(4) as pool:
        workers = list(pool.map(start, range(8)))
    assert sys.modules["__main__"] is main
    assert {worker.wait(PATIENCE) for worker in workers} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_outlive_their_fork_server(
        config: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_tended_at", -math.inf)
    worker = WorkerProcess(config, tmp_path / "output")
    server = server_pid()
    assert server is not None
    os.kill(server, number)
    until(lambda: forkserver.process_state(server) in (forkserver.STOPPED, forkserver.ENDED))
    forkserver.tend()
    later = server_pid()
    assert later != server
    os.kill(later, signal.SIGKILL)
    until(lambda: forkserver.process_state(later) == forkserver.ENDED)
    forkserver.tend()  # not over and over: it may be its imports that end it
    assert server_pid() == later
    another = WorkerProcess(config, tmp_path / "another")
    assert worker.poll() is None
    worker.kill()
    assert worker.wait(PATIENCE) == 255
    assert worker.unreported
    another.kill()
    assert another.wait(PATIENCE) == -signal.SIGKILL


def test_a_killed_worker_of_a_stopped_fork_server(
        config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_EXIT_CODE_S", 0.1)
    worker = WorkerProcess(config, tmp_path / "output")
    server = server_pid()
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    worker.kill()
    assert worker.wait(PATIENCE) == 255
    assert network_beds.ended(server, PATIENCE)


@pytest.mark.slow
def test_a_fork_server_that_does_not_answer_is_replaced(config: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_START_S", 0.5)
    worker = WorkerProcess(config, tmp_path / "output")
    server = server_pid()
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    another = WorkerProcess(config, tmp_path / "another")
    assert server_pid() != server
    worker.kill()
    assert worker.wait(PATIENCE) == 255
    another.kill()
    assert another.wait(PATIENCE) == -signal.SIGKILL


# Without a guard: a process that imports it as its main module would start a cluster, too.
SERVES = """
import sys
from pathlib import Path
from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes.addresses import Loopback
from flowspec_edge.drivers.processes.forkserver import server_pid
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec, Here
place = Here(Loopback() if sys.argv[2] == "programs" else None)
with ProcessCluster(ClusterSpec(Path(sys.argv[1]), 1, threads=1), place).start() as cluster:
    cluster.generate(Request(list(range(9)), "autoregressive", 2))
    print(server_pid() or "", *cluster.pids, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SERVES)
    return path


def test_a_path_too_long_for_a_socket_is_one_line(script: Path, tiny_model: Path, tmp_path: Path) -> None:
    temporary = tmp_path / ("a" * 100)
    temporary.mkdir()
    done = subprocess.run([sys.executable, str(script), str(tiny_model), "forks"], text=True,
                          capture_output=True, check=False, env={**os.environ, "TMPDIR": str(temporary)})
    assert "FlowspecError: cannot start the fork server for workers" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "processes"), [("forks", 2), ("programs", 1)])
def test_nothing_is_left_of_a_killed_starter(script: Path, tiny_model: Path, short_tmp_path: Path, workers: str,
                                             processes: int) -> None:
    """The workers and their fork server end, and remove the cluster's directory."""
    with subprocess.Popen([sys.executable, str(script), str(tiny_model), workers],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "TMPDIR": str(short_tmp_path)}) as serving:
        assert serving.stdout is not None
        pids = [int(pid) for pid in serving.stdout.readline().split()]
        assert len(pids) == processes
        assert [*short_tmp_path.glob("flowspec-*/v1.toml")]
        serving.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    until(lambda: not [*short_tmp_path.iterdir()])


@pytest.mark.slow  # a new fork server here, and another for the next file's workers
def test_one_that_never_answers_ends_the_recovery_and_is_named(model: Path, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    """Every new one is stopped, too; after the recovery's deadline no other one is tried."""
    tried = []
    with ProcessCluster(ClusterSpec(model, 1, threads=1, rejoin_within=1.0)).start() as cluster:
        preload = forkserver.preload

        def stopped() -> None:
            preload()
            server = server_pid()
            assert server is not None
            os.kill(server, signal.SIGSTOP)
            tried.append(server)

        def strike() -> None:
            monkeypatch.setattr(forkserver, "preload", stopped)
            os.kill(cluster.pids[0], signal.SIGKILL)

        with pytest.raises(FlowspecError, match=r"the fork server for workers .* does not answer"):
            cluster.generate(Request(PROMPT, "flowspec", 20), on_third(strike))
        monkeypatch.undo()
    assert len(tried) == 1
