"""What happens on the strict device, and which line of the package caused it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

extension: ModuleType | None = None  # once the device is installed
_open: list[Log] = []


class Event(NamedTuple):
    """One launch, copy, wait or allocation.

    kind    "launch"; "upload" and "download" run beside the host; "upload, pageable", "upload, waits",
            "download, waits" and "wait" hold the host up; "allocation" of device memory; "note"
    name    the operation without "aten::", what is waited for, or what is noted
    nbytes  read from the device, copied or allocated
    place   the package's innermost function, as "stage/forward.py:hidden_states"; "" outside of the package
    trail   the package's two innermost lines, as "stage/forward.py:144 < stage/engine.py:210"
    """

    kind: str
    name: str
    nbytes: int
    place: str
    trail: str


# Where the host stands still until the device has come so far.
WAITS = frozenset({"upload, pageable", "upload, waits", "download, waits", "wait"})


@dataclass
class Log:
    """The events of a piece of work, in order."""

    events: list[Event] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @property
    def launches(self) -> Counter[str]:
        """Kernels by operation; ``launches.total()`` is their number."""
        return Counter(event.name for event in self.of("launch"))

    @property
    def waits(self) -> list[Event]:
        return self.of(*WAITS)


@dataclass
class Allocations(Log):
    """The allocations of device memory, temporary ones among them; in bytes, once the block is left.

    kept  by how much the memory in use has grown (negative: shrunk)
    peak  by how much it had grown at most
    """

    kept: int = 0
    peak: int = 0


@contextmanager
def counting(*, fused_rms: bool = True) -> Iterator[Log]:
    """Count what happens inside, in all threads of this process.

    ``fused_rms``: whether rms_norm is one kernel, as from PyTorch 2.9 on, or composed of eight, as in 2.8.
    """
    strict, log = device(), Log()
    was = strict.fused_rms(fused_rms)
    _open.append(log)
    try:
        yield log
    finally:
        _open.remove(log)
        strict.fused_rms(was)


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Record allocations inside; one such block at a time."""
    strict, made = device(), Allocations()
    before = strict.held()
    strict.forget_most()
    strict.tell_allocations(True)
    try:
        with counting() as log:
            yield made
    finally:
        strict.tell_allocations(False)
        made.events = log.of("allocation")
        made.kept, made.peak = strict.held() - before, strict.most() - before


def tell(kind: str, name: str, nbytes: int = 0) -> None:
    """Add an event of the extension, whose listener this is, to the open logs."""
    if _open:
        event = Event(kind, name, nbytes, *_cause())
        for log in _open:
            log.events.append(event)


def device() -> ModuleType:
    if extension is None:
        raise RuntimeError("the strict device is not installed: run `python tests/strictdevice TESTS`")
    return extension


def _cause() -> tuple[str, str]:
    """Return the ``place`` and ``trail`` of an event."""
    package = sys.modules.get("flowspec_edge")
    if package is None or package.__file__ is None:
        return "", ""
    root = f"{Path(package.__file__).parent}/"
    frame: FrameType | None = sys._getframe(1)
    place, lines = "", list[str]()
    while frame is not None and len(lines) < 2:
        code = frame.f_code
        if code.co_filename.startswith(root):
            path = code.co_filename.removeprefix(root)
            lines.append(f"{path}:{frame.f_lineno}")
            if not place and not code.co_name.startswith("<"):  # no comprehension, no lambda
                place = f"{path}:{code.co_name}"
        frame = frame.f_back
    return place, " < ".join(lines)
