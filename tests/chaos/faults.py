"""Each kind of fault: how it strikes, and how it is undone."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import fleetkit

from tests.chaos.schedule import LINKS, LOCAL, RANKS, Fault
from tests.chaos.services import LinkedService, LocalService, Service, until

_CGROUPS = Path("/sys/fs/cgroup/memory")
_HOUR_S = 3600
_SLOW_MBPS = 0.5

Undo = Callable[[], None]


def able() -> set[str]:
    """The kinds that this machine permits."""
    kinds = {*LOCAL, *LINKS, *RANKS}
    if os.geteuid() != 0 or not shutil.which("mount"):
        kinds.discard("disk_full")
    if not shutil.which("gcc"):
        kinds.discard("clock_back")
    if fleetkit.why_no_bed():
        kinds -= {"link_cut", "link_slow"}
    return kinds


def build_clock(directory: Path) -> Path | None:
    """A library for LD_PRELOAD; None without a compiler."""
    if not shutil.which("gcc"):
        return None
    library = directory / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library),
                    str(Path(__file__).with_name("clock.c")), "-ldl"], check=True)
    return library


def strike(fault: Fault, service: Service) -> Undo:
    """Return what ends the fault after its ``hold_s``; most need nothing."""
    first, second = fault.stages[0], fault.stages[1]
    match fault.kind:
        case "none":
            pass
        case "kill":
            _kill(service, [first])
        case "kill_two":
            _kill(service, [first, second])
        case "kill_all":
            _kill(service, fault.stages)
        case "kill_again":
            _kill(service, [first])
            until(lambda: service.readiness() != "" or service.stage_pid(first) is not None, "the loss")
            _kill(service, [second])
        case "stop":
            _signal(service.stage_pid(first), signal.SIGSTOP)
        case "stop_continue":
            return _stopped(service.stage_pid(first))
        case "draft_stop_continue":
            return _stopped(service.draft_pid)
        case "fork_server_kill":
            assert isinstance(service, LocalService)
            _signal(service.fork_server, signal.SIGKILL)
        case "fork_server_stop":
            assert isinstance(service, LocalService)
            _signal(service.fork_server, signal.SIGSTOP)
            _kill(service, [first])
        case "draft_kill":
            service.kill_draft()
            if random.Random(str(fault)).random() < 0.5:  # as after a power cut, without a battery
                service.set_clock(-_HOUR_S)
            service.start()
        case "disk_full":
            assert isinstance(service, LocalService)
            service.fill_disk()
            _kill(service, [first])
            return service.free_disk
        case "clock_back":
            service.set_clock(-round(fault.hold_s * _HOUR_S))
            _kill(service, [first])
        case "memory_limit":
            return _limit_memory(service.stage_pid(first))
        case "link_cut":
            assert isinstance(service, LinkedService)
            service.plug(first, "down")
            return lambda: service.plug(first, "up")
        case "link_slow":
            assert isinstance(service, LinkedService)
            service.bed.shape(_SLOW_MBPS)
            return lambda: service.bed.shape(None)
        case _:
            raise ValueError(fault.kind)
    return _nothing


def _nothing() -> None:
    pass


def _kill(service: Service, stages: Sequence[int]) -> None:
    for stage in stages:
        _signal(service.stage_pid(stage), signal.SIGKILL)


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _stopped(pid: int | None) -> Undo:
    if pid is None:
        return _nothing
    handle = os.pidfd_open(pid)  # the number may be another process' when this one was replaced
    signal.pidfd_send_signal(handle, signal.SIGSTOP)

    def go_on() -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGCONT)
        os.close(handle)

    return go_on


def _limit_memory(pid: int | None) -> Undo:
    """No page more: the kernel's OOM killer strikes, or without cgroups allocations fail."""
    if pid is None:
        return _nothing
    group = _CGROUPS / f"flowspec-chaos-{os.getpid()}-{pid}"
    try:
        group.mkdir()
    except OSError:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, (1, 1))
        return _nothing

    def remove() -> None:
        (_CGROUPS / "cgroup.procs").write_text(str(pid)) if Path(f"/proc/{pid}").exists() else None
        group.rmdir()

    with suppress(ProcessLookupError):
        (group / "memory.limit_in_bytes").write_text("65536")
        (group / "cgroup.procs").write_text(str(pid))
    return remove
