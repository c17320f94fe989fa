"""Workers that are forked: they are what a worker started by itself is, and their ends are told."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fleetkit
import pytest
from clusterkit import PATIENCE

from flowspec_edge.errors import FlowspecError
from flowspec_edge.runtime import nursery as module
from flowspec_edge.runtime.nursery import Nursery
from flowspec_edge.runtime.waiting import readable
from flowspec_edge.runtime.workerconfig import WorkerConfig


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def waiting(tmp_path: Path, tiny_model: Path) -> Path:
    """The configuration of a worker that waits for a D0 which never comes."""
    config = WorkerConfig(instance="v1", stage=1, stages=2, model=str(tiny_model / "target"), threads=1,
                          control="tcp://127.0.0.1:1", listen="tcp://127.0.0.1:*", next="tcp://127.0.0.1:2",
                          parent=1)  # its real parent is put in
    path = tmp_path / "v1.toml"
    path.write_text(config.dump())
    return path


def heeds_sigterm(pid: int) -> bool:
    """Whether the process has a handler of its own for it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> signal.SIGTERM - 1 & 1)


@pytest.mark.parametrize(("act", "code"), [("terminate", 0), ("kill", -signal.SIGKILL)])
def test_a_worker_runs_until_it_is_ended(nursery: Nursery, tmp_path: Path, tiny_model: Path, act: str,
                                         code: int) -> None:
    worker = nursery.start(waiting(tmp_path, tiny_model), tmp_path / "said")
    other = nursery.start(waiting(tmp_path, tiny_model), tmp_path / "other")
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.2)
        assert (worker.poll(), nursery.idle) == (None, False)
        until = time.monotonic() + PATIENCE
        while not heeds_sigterm(worker.pid) and time.monotonic() < until:  # it may just have begun
            with pytest.raises(subprocess.TimeoutExpired):
                worker.wait(0.05)
        assert os.getsid(worker.pid) == worker.pid  # Ctrl-C is not for it
        getattr(worker, act)()
        assert worker.wait(PATIENCE) == code
        assert worker.poll() == code
        worker.kill()  # too late, and harmless
        assert other.poll() is None
    finally:
        other.kill()
    assert other.wait(PATIENCE) == -signal.SIGKILL
    assert nursery.idle


def test_descriptors_beyond_those_of_select_and_a_nursery_that_is_killed(
        nursery: Nursery, tmp_path: Path, tiny_model: Path) -> None:
    """Its workers do not outlive it."""
    with ExitStack() as opened:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limit[1]), limit[1]))
        highest = 0
        while highest < 1024:
            highest = os.dup(0)
            opened.callback(os.close, highest)
        another = Nursery()
        opened.callback(another.close)
        for made in (nursery, another):
            assert made.start(tmp_path / "nothing.toml", tmp_path / "said").wait(PATIENCE) == 2
        worker = another.start(waiting(tmp_path, tiny_model), tmp_path / "said")
        os.kill(another._process.pid, signal.SIGKILL)
        assert worker.wait(PATIENCE) != 0
        assert not another.usable
        with pytest.raises(FlowspecError, match="the process that starts workers is gone"):
            another.start(waiting(tmp_path, tiny_model), tmp_path / "said")


def test_what_is_wrong_is_in_its_output_and_its_exit_code(nursery: Nursery, tmp_path: Path) -> None:
    worker = nursery.start(tmp_path / "nothing.toml", tmp_path / "said")
    assert worker.wait(PATIENCE) == 2
    alone = subprocess.run([sys.executable, "-m", "flowspec_edge.runtime.worker", "--config",
                            str(tmp_path / "nothing.toml")], capture_output=True, text=True, check=False)
    assert ((tmp_path / "said").read_text(), 2) == (alone.stderr, alone.returncode)


_ASKS = """
import sys
from pathlib import Path
from flowspec_edge.runtime.nursery import nursery
worker = nursery().start(Path(sys.argv[1]), Path(sys.argv[2]))
print(nursery()._process.pid, worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.soak  # test_processes kills a D0 with workers at work
def test_nobody_outlives_the_process_that_asked(tmp_path: Path, tiny_model: Path) -> None:
    files = [str(waiting(tmp_path, tiny_model)), str(tmp_path / "said")]
    with subprocess.Popen([sys.executable, "-c", _ASKS, *files], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        pids = [int(pid) for pid in asking.stdout.readline().split()]
        ends = [os.pidfd_open(pid) for pid in pids]
        asking.kill()
    for end in ends:
        assert readable([end], PATIENCE)
        os.close(end)


def test_a_changed_environment_wants_another_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = module._nursery  # which other tests go on with: a new one imports for seconds
    module._nursery = None
    try:
        changed_environment(monkeypatch)
    finally:
        if module._nursery is not None:
            module._nursery.close()
        module._nursery = ours


def changed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    first = module.nursery()
    assert module.nursery() is first
    monkeypatch.setenv("FLOWSPEC_TEST", "1")
    second = module.nursery()
    assert second is not first
    if first.idle:
        assert fleetkit.ended(first._process.pid, PATIENCE)
    monkeypatch.undo()
    assert module.nursery() is not second
