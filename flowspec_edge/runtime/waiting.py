"""Waiting for file descriptors, of any number: ``select`` knows only those below 1024."""

from __future__ import annotations

import math
import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], timeout: float | None) -> list[int]:
    """Those that can be read, or of which an end is told, within ``timeout`` seconds; None: as long as it
    takes."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout is None else math.ceil(timeout * 1e3))]
