"""For the tests of clusters of processes: a prompt, liveness, a callback in the middle of a text."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster

PROMPT = [(7 * i + 3) % 290 for i in range(70)]  # two chunks
PATIENCE = 120.0  # seconds; only a failing test waits so long


def alive(pid: int) -> bool:
    """Whether there is such a process, zombies included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def on_third(act: Callable[[], None]) -> Callable[[list[int]], None]:
    """A token callback that acts once, in the middle of the text."""
    seen: list[int] = []

    def on_tokens(new: list[int]) -> None:
        before = len(seen)
        seen.extend(new)
        if before < 3 <= len(seen):
            act()

    return on_tokens


@contextmanager
def served(cluster: ProcessCluster) -> Iterator[None]:
    """Another thread answers."""
    stopped = threading.Event()
    server = threading.Thread(target=cluster.serve, args=(stopped.is_set,))
    server.start()
    try:
        yield
    finally:
        stopped.set()
        server.join(PATIENCE)
    assert not server.is_alive()


def until(true: Callable[[], bool], within: float = PATIENCE) -> None:
    """Wait for something that another thread or process does; ``within``: seconds."""
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)  # between two looks, up to the deadline: no event tells of any such state
