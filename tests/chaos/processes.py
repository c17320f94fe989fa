"""What processes hold, read from /proc."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


def running(pid: int) -> bool:
    """Zombies do not run."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> set[int]:
    below = children(pid)
    return {*below}.union(*(descendants(child) for child in below))


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


@dataclass(frozen=True)
class Holdings:
    """Of a server at rest."""

    processes: int
    threads: int
    descriptors: int
    files: int  # below its TMPDIR; a killed fork server's socket stays until the end
    draft_mib: float  # resident, of the draft device
    stage_mib: float  # resident, of the largest other process

    def growth(self, before: Holdings) -> dict[str, float]:
        return {name: round(value - getattr(before, name), 1) for name, value in vars(self).items()}


def holdings(draft: int, pids: Iterable[int], temporary: Path) -> Holdings:
    """OSError if one of the processes ends meanwhile."""
    pids = set(pids)
    found = [Path(f"/proc/{pid}") for pid in pids]
    return Holdings(
        processes=len(found), threads=sum(len([*(one / "task").iterdir()]) for one in found),
        descriptors=sum(len([*(one / "fd").iterdir()]) for one in found),
        files=sum(not file.name.startswith("listener-") for file in temporary.rglob("*")),
        draft_mib=_resident_mib(draft), stage_mib=max(map(_resident_mib, pids - {draft})))


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has ended")  # and its parent has not noticed
