"""How far long work has come: a bar on a terminal, else a line on stderr every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 5.0
_LONG_S = 10.0  # a board that takes longer is named


@contextmanager
def progress(total: int, title: str = "bench", unit: str = "runs") -> Iterator[Callable[[str], None]]:
    """Call the result before each of ``total`` steps, with the step's description; ``title``: all of them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    started = 0
    with (plain_lines(lambda seconds: f"{title}: {done_of(max(0, started - 1), total, seconds, unit)}"),
          Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar):
        task = bar.add_task(title, total=total)

        def advance(step: str) -> None:
            nonlocal started
            bar.update(task, description=f"{title}: {step}", completed=started)
            started += 1

        yield advance


@contextmanager
def plain_lines(say: Callable[[float], str]) -> Iterator[None]:
    """Print ``say(seconds so far)`` every few seconds, unless it is empty or stderr is a terminal."""
    started = time.monotonic()

    def report() -> None:
        if line := say(time.monotonic() - started):
            print(f"flowspec: {line}", file=sys.stderr, flush=True)

    with every(_EVERY_S, report if not sys.stderr.isatty() else lambda: None):
        yield


@contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` in a thread, once in every ``seconds`` seconds."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_EVERY_S)  # it acts at most once more


def long_waits() -> str:
    """Name the boards that are slow to answer, such as "waiting for orin-2 (10.0.0.12), 35 s"; "" without any."""
    from flowspec_edge.boards.commands import waited_for

    waits = [f"{board}, {seconds:.0f} s" for board, seconds in waited_for() if seconds >= _LONG_S]
    return f"waiting for {'; '.join(waits)}" if waits else ""


@contextmanager
def asking_boards(title: str = "asking the boards") -> Iterator[Callable[[str], None]]:
    """Show ``title`` on a terminal, and anywhere which boards are waited for.

    Yield a function to call with what has been done.
    """
    from rich.console import Console
    from rich.markup import escape

    now = title
    with Console(stderr=True).status(escape(title)) as status:

        def show() -> None:
            status.update(escape("; ".join(filter(None, (now, long_waits())))))

        def done(text: str) -> None:
            nonlocal now
            now = text
            show()

        with every(1.0, show), plain_lines(lambda seconds: long_waits()):
            yield done


def done_of(done: float, total: float, seconds: float, unit: str) -> str:
    """Write progress such as "12 of 64 runs, 35 s, about 150 s left"."""
    remaining = f", about {seconds / done * (total - done):.0f} s left" if done else ""
    return f"{done:,.0f} of {total:,.0f} {unit}, {seconds:.0f} s{remaining}"
