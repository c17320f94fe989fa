"""Each kind of fault: how it strikes, and how it is undone."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kits import network_beds

from tests.chaos.schedule import LINKS, LOCAL, Fault
from tests.chaos.services import LinkedService, LocalService, Service, until

# Where groups are, and the name of their limit: cgroups 1 and 2.
_CGROUPS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
_LIMIT_BYTES = 65536
_HOUR_S = 3600
_SLOW_MBPS = 0.5

Undo = Callable[[], None]


def able() -> set[str]:
    """The kinds that this machine permits."""
    kinds = {*LOCAL, *LINKS}
    if not _can_mount():
        kinds.discard("disk_full")
    if not shutil.which("gcc"):
        kinds.discard("clock_back")
    if network_beds.why_no_bed():
        kinds -= {"link_cut", "link_slow"}
    return kinds


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as place, suppress(OSError):
        if subprocess.run(["mount", "-t", "tmpfs", "chaos", place], capture_output=True).returncode == 0:
            subprocess.run(["umount", place], check=True)
            return True
    return False


def build_clock(directory: Path) -> Path | None:
    """A library for LD_PRELOAD; None without a compiler."""
    if not shutil.which("gcc"):
        return None
    library = directory / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library),
                    str(Path(__file__).with_name("clock.c")), "-ldl"], check=True)
    return library


def strike(fault: Fault, service: Service) -> Undo | None:
    """Return what ends the fault after its ``hold_s``; None: nothing has to."""
    first, second = fault.stages[0], fault.stages[-1]
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
    return None


def _kill(service: Service, stages: Sequence[int]) -> None:
    for stage in stages:
        _signal(service.stage_pid(stage), signal.SIGKILL)


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _stopped(pid: int | None) -> Undo | None:
    if pid is None:
        return None
    handle = os.pidfd_open(pid)  # the number may be another process' when this one was replaced
    signal.pidfd_send_signal(handle, signal.SIGSTOP)

    def go_on() -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGCONT)
        os.close(handle)

    return go_on


def _limit_memory(pid: int | None) -> Undo | None:
    """No page more: the kernel's OOM killer strikes; without the right to make a group, allocations fail."""
    if pid is None:
        return None
    for base, limit in _CGROUPS:
        group = base / f"flowspec-chaos-{pid}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(_LIMIT_BYTES))
                (group / "cgroup.procs").write_text(str(pid))
            except OSError:
                group.rmdir()
                raise
            return partial(_remove_group, group)
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
    return None


def _remove_group(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():  # it needed no more memory
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    until(lambda: not (group / "cgroup.procs").read_text(), "the end of a process without memory")
    group.rmdir()
