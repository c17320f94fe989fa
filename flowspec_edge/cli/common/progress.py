"""How far long work has come: a bar on a terminal, else a line on stderr every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 5.0


@contextmanager
def progress(total: int, what: str = "bench", unit: str = "runs") -> Iterator[Callable[[str], None]]:
    """Call the result before each of ``total`` steps, with the step's description; ``what``: all of them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    started = 0
    with (plain_lines(lambda seconds: f"{what}: {done_of(max(0, started - 1), total, seconds, unit)}"),
          Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar):
        task = bar.add_task(what, total=total)

        def advance(step: str) -> None:
            nonlocal started
            bar.update(task, description=f"{what}: {step}", completed=started)
            started += 1

        yield advance


@contextmanager
def plain_lines(say: Callable[[float], str]) -> Iterator[None]:
    """Print ``say(seconds so far)`` every few seconds, unless stderr is a terminal."""
    if sys.stderr.isatty():
        yield
        return
    ended, started = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(_EVERY_S):
            print(f"flowspec: {say(time.monotonic() - started)}", file=sys.stderr, flush=True)

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join(_EVERY_S)  # it prints at most one line more


def done_of(done: float, total: float, seconds: float, unit: str) -> str:
    """Such as "12 of 64 runs, 35 s, about 150 s left"."""
    left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
    return f"{done:,.0f} of {total:,.0f} {unit}, {seconds:.0f} s{left}"
